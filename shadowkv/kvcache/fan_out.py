"""``FanOut``: caches that store the same prompts in one prefill, each in its own form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.prefill.prefill_batch import PrefillBatch
from shadowkv.kvcache.recurrent.recurrent_part import RecurrentPart
from shadowkv.kvcache.sequences.group_layout import neighbours
from shadowkv.kvcache.sequences.sequence import CachedSequence


class FanOut:
    """Several caches of one model that are prefilled together, for comparing policies. Each prompt has a sequence in
    every cache. The first cache computes attention. The others store the same keys and values in their own form; their
    sequences must be new."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches, self.device = list(caches), caches[0].device
        self._batches: list[PrefillBatch] = []

    def prefill_batch(self, sequences: list[tuple[tuple[CachedSequence, ...], int]]) -> PrefillBatch:
        """Packs new tokens of prompts. Each item has a prompt's sequences, one per cache, and the prompt's number of
        new tokens."""
        of_caches = list(zip(*(of_prompt for of_prompt, _ in sequences), strict=True))
        works = [[(own, count) for own, (_, count) in zip(of_cache, sequences, strict=True)] for of_cache in of_caches]
        bounds = {
            group.layers[layers.start]  # layers are stored together only if they are in one group in every cache
            for cache in self.caches
            for group in cache.layout.groups
            for layers in neighbours(group.layers)
        }
        first = self.caches[0].prefill_batch(works[0], bounds)
        others = zip(self.caches[1:], works[1:], strict=True)
        self._batches = [first, *(cache.prefill_batch(work, bounds, first) for cache, work in others)]
        return first

    def append(self, layer: int, k: Tensor, v: Tensor, batch: Batch, index_keys: Tensor | None = None) -> None:
        """Stores a block's keys and values."""
        self.caches[0].append(layer, k, v, batch, index_keys)

    def start(
        self, layer: int, q: Tensor, batch: Batch, sinks: Tensor | None = None, index: IndexQueries | None = None
    ) -> Callable[[], Tensor]:
        """Starts a block's attention."""
        return self.caches[0].start(layer, q, batch, sinks, index)

    def states(self, layer: int, batch: Batch) -> tuple[dict[str, Tensor], tuple[RecurrentPart, ...]]:
        """The recurrent states of a layer."""
        return self.caches[0].states(layer, batch)

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores a layer's new tokens in every cache."""
        for cache, own in zip(self.caches, self._batches, strict=True):
            cache.finish_prefill(layer, own)

    def leave_prefill(self) -> None:
        """Must be called when a prefill ends or is abandoned."""
        for cache in self.caches:
            cache.leave_prefill()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences."""
        first = self.caches[0]
        first.end_prefill(self._batches[0])
        for cache, own in zip(self.caches[1:], self._batches[1:], strict=True):
            for new, source in zip(own.new, self._batches[0].new, strict=True):
                if cache.recurrent is not None and first.recurrent is not None:
                    cache.recurrent.adopt(new.sequence.recurrent, first.recurrent, source.sequence.recurrent)
            cache.end_prefill(own)
