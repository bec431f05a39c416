"""One prefill into several caches whose policies attend alike in prefill: all store the same keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.prefill.batch import PrefillBatch, PrefillBlock
from shadowkv.kvcache.sequences.sequence import CachedSequence


class FanOut:
    """Several caches of one model that are prefilled together, with one sequence in each for every prompt.

    The first computes; the others, whose sequences are new, store the same keys and values in their own form.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches, self.device = list(caches), caches[0].device
        self._batches: list[PrefillBatch] = []

    def prefill_batch(self, sequences: list[tuple[tuple[CachedSequence, ...], int]]) -> PrefillBatch:
        """Packs new tokens: for each prompt its sequences, one of each cache, and how many tokens they gain."""
        of_caches = list(zip(*(one for one, _ in sequences), strict=True))
        first = self.caches[0].prefill_batch([(one[0], count) for one, count in sequences])
        bounds = {bound for cache in self.caches for run in cache.layout.runs for bound in (run.start, run.stop)}
        first.runs = [range(*pair) for pair in pairwise(sorted(bounds))]  # alike in every cache
        self._batches = [first, *(first.of(list(others)) for others in of_caches[1:])]
        return first

    def append(self, layer: int, k: Tensor, v: Tensor, batch: PrefillBlock) -> None:
        """Takes a block's keys and values."""
        self.caches[0].append(layer, k, v, batch)

    def begin(self, layer: int, q: Tensor, batch: PrefillBlock) -> Callable[[], Tensor]:
        """Begins a block's attention."""
        return self.caches[0].begin(layer, q, batch)

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores a layer in every cache."""
        for cache, one in zip(self.caches, self._batches, strict=True):
            cache.finish_prefill(layer, one)

    def leave_prefill(self) -> None:
        """To be called when a prefill ends or is given up."""
        for cache in self.caches:
            cache.leave_prefill()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences."""
        for cache, one in zip(self.caches, self._batches, strict=True):
            cache.end_prefill(one)
