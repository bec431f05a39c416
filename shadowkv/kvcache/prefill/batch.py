"""What a prefill tells the cache: which new tokens of which sequences, packed, and where they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.decode.batch import OBSERVED, SealedBatch, layers_at_once
from shadowkv.kvcache.memory.upload import upload
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.sequences.sequence import CachedSequence


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of one sequence in a packed prefill: rows ``start`` to ``stop`` of the batch."""

    sequence: CachedSequence
    start: int
    stop: int
    cached: int


@dataclass(frozen=True)
class ExactRows:
    """Tokens in exact pages: granules of the pages and rows there, int64 [n] each."""

    pages: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class CachedSegment:
    """A segment of a cached sequence, as later tokens attend to it.

    Attributes:
        row: a batch of one row.
        static: its sink and outliers.
        names: names of its state, its pages and those of its values: the same for sequences that share it.
    """

    row: SealedBatch
    static: ExactRows
    names: tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """Where the new tokens of a sequence go, the same in every layer: on the device, so that no layer waits for a copy.

    Attributes:
        length: tokens of the sequence, including them.
        before, sealed: tokens that are sealed already, and those that are sealed now.
        fits: whether their segment is new: its state is to be fitted.
        state: int64 [1], the state of their segment.
        observed: int64 [1], the state that learns from their last queries: that one, or the one that is reserved for
            when a dense sequence is compressed; None where there is none.
        first: position of the first token of their segment.
        pages, value_pages: int64 [sealed / 64], names of the pages that they go to.
        page_starts: int64 [sealed / 64], positions of the first tokens of these pages.
        static: where the sink and the outliers of a new segment go.
        tail: where the exact tokens that the sequence already has are; those that are sealed now come from there first.
        exact: where the newest tokens go, or all new ones where none are sealed.
        cached: the segments that the sequence has already.
    """

    length: int
    before: int
    sealed: int
    fits: bool
    state: Tensor
    observed: Tensor | None
    first: int
    pages: Tensor
    value_pages: Tensor
    page_starts: Tensor
    static: ExactRows
    tail: ExactRows
    exact: ExactRows
    cached: tuple[CachedSegment, ...]


@dataclass(frozen=True)
class LastQueries:
    """Sequences of a batch for which equally many last queries are kept: the parts learn from them together.

    Attributes:
        states: int64 [n], the states that learn.
        rows: int64 [n, w], rows of the batch's ``queries``.
        first: int64 [n], the token within its segment that each one's first query belongs to.
    """

    states: Tensor
    rows: Tensor
    first: Tensor


@dataclass(frozen=True)
class ToStore:
    """What is stored of the new tokens of some sequences, the same in every layer.

    Attributes:
        observed: what is learned first.
        exact: tokens that stay exact, as rows of the batch, and where they go; neighbours are joined.
        sealed: the others, each sequence's rows and places.
    """

    observed: list[LastQueries]
    exact: list[tuple[slice, ExactRows]]
    sealed: list[tuple[slice, Places]]


class PrefillBatch:
    """New tokens of one or a few sequences, packed, and their keys and values in the layers that are stored together.

    Attributes:
        new: tokens of each sequence, in order.
        positions: int64 [T].
        starts: int32 [S + 1], where each sequence's tokens begin.
        layers_at_once: g, how many layers are stored together.
        keys, rope_keys, values: [g, T, H, d], scratch of the layers at work, reused by the next.
        queries: the same for the last tokens of each sequence, one after the other: [g, Q, H_q, d], after RoPE.
        last: int64 [Q], the rows of the batch that those belong to.
        runs: layers that are alike: only those are stored together.
        storing: the layer during whose last attention new sequences are being stored, or were last.
    """

    def __init__(
        self, new: list[NewTokens], device: torch.device, shape: ModelShape, dtype: torch.dtype, runs: Sequence[range]
    ) -> None:
        self.new, self.runs = new, runs
        self.num_tokens = new[-1].stop
        positions = np.concatenate([np.arange(s.cached, s.cached + s.stop - s.start) for s in new])
        self._last = np.concatenate([np.arange(max(s.start, s.stop - OBSERVED), s.stop) for s in new])
        starts = np.array([0, *(s.stop for s in new)])
        numbers = upload(torch.from_numpy(np.concatenate((positions, self._last, starts))), device)
        self.positions, self.last, starts_there = numbers.split([len(positions), len(self._last), len(starts)])
        self.starts = starts_there.int()
        observed = len(self._last)
        cached = sum(s.cached for s in new)  # their keys may be rebuilt for a subspace that the new ones share
        self.layers_at_once = layers_at_once(shape, self.num_tokens + cached, observed)
        self.keys, self.rope_keys, self.values = (
            torch.empty(
                self.layers_at_once, self.num_tokens, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device
            )
            for _ in range(3)
        )
        # Zeros: random keys may be stored without having been attended to.
        size = self.layers_at_once, observed, shape.num_query_heads, shape.head_dim
        self.queries = torch.zeros(size, dtype=dtype, device=device)
        self.storing: int | None = None
        self._places: dict[int, Places] = {}
        self._to_store: dict[bool, ToStore] = {}
        self._alike: dict[tuple[int, int], list[tuple[Run, ...]]] = {}

    def of(self, sequences: list[CachedSequence]) -> PrefillBatch:
        """The same new tokens as those of other sequences, empty ones of another cache; keys and values are shared."""
        other = copy(self)
        other.new = [replace(s, sequence=sequence) for s, sequence in zip(self.new, sequences, strict=True)]
        other._places, other._to_store, other._alike = {}, {}, {}
        return other

    def places_of(
        self, segment: NewTokens, find: Callable[[Sequence[tuple[CachedSequence, int]]], list[Places]]
    ) -> Places:
        """Where a segment's tokens go; the places of all segments are found on the first call."""
        if not self._places:
            found = find([(one.sequence, one.stop - one.start) for one in self.new])
            self._places = {one.start: places for one, places in zip(self.new, found, strict=True)}
        return self._places[segment.start]

    def to_store(self, cached: bool, find: Callable[[list[NewTokens]], ToStore]) -> ToStore:
        """What is stored of sequences that have something ``cached``, or of the new ones; found on the first call."""
        if cached not in self._to_store:
            self._to_store[cached] = find([one for one in self.new if bool(one.cached) == cached])
        return self._to_store[cached]

    def alike(
        self, block: PrefillBlock, shared: Callable[[PrefillBatch, Run], tuple[object, ...] | None]
    ) -> list[tuple[Run, ...]]:
        """Runs of a block, grouping neighbours for which ``shared`` returns the same; found on the first call."""
        if (block.start, block.stop) not in self._alike:
            found: list[tuple[Run, ...]] = []
            last: tuple[object, ...] | None = None
            for run in block.runs:
                this = shared(self, run)
                if this is not None and this == last:
                    found[-1] += (run,)
                else:
                    found.append((run,))
                last = this
            self._alike[block.start, block.stop] = found
        return self._alike[block.start, block.stop]

    def stored_after(self, layer: int) -> slice | None:
        """The layers that are stored together once ``layer`` has been computed; None where more layers belong to it."""
        place = self.place(layer)
        if place + 1 < self.layers_at_once and layer + 1 != self._run(layer).stop:
            return None
        return slice(layer - place, layer + 1)

    def place(self, layer: int) -> int:
        """The place of ``layer`` among the layers in scratch."""
        return (layer - self._run(layer).start) % self.layers_at_once

    def _run(self, layer: int) -> range:
        return next(run for run in self.runs if layer in run)

    def last_of(self, segment: NewTokens) -> np.ndarray:
        """Rows of ``queries`` that belong to a segment."""
        return np.arange(*np.searchsorted(self._last, (segment.start, segment.stop)))

    def keep_queries(self, layer: int, block: PrefillBlock, q: Tensor) -> None:
        """Keeps those of a block's RoPE-rotated queries [n, H_q, d] that are among the last of their sequences."""
        if len(block.last):
            self.queries[self.place(layer), block.kept] = q[block.last]

    def block(self, start: int, stop: int) -> PrefillBlock:
        """Tokens ``start`` to ``stop`` of the batch."""
        kept = slice(*np.searchsorted(self._last, (start, stop)).tolist())
        runs = tuple(self._runs(start, stop))
        return PrefillBlock(self, start, stop, runs, kept, self.last[kept] - start)

    def newest(self) -> list[PrefillBlock]:
        """The last tokens of each sequence, whose queries are kept."""
        return [self.block(max(one.start, one.stop - OBSERVED), one.stop) for one in self.new]

    def _runs(self, start: int, stop: int) -> Iterator[Run]:
        def packed(numbered: tuple[int, NewTokens]) -> bool:
            one = numbered[1]
            return not one.cached and start <= one.start and one.stop <= stop

        here = [(i, one) for i, one in enumerate(self.new) if one.start < stop and start < one.stop]
        for together, found in groupby(here, packed):
            numbers, segments = zip(*found, strict=True)
            if together and len(segments) > 1:
                starts = self.starts[numbers[0] : numbers[-1] + 2] - segments[0].start
                longest = max(one.stop - one.start for one in segments)
                yield Run(segments[0].start, segments[-1].stop, None, starts, longest)
                continue
            for one in segments:
                yield Run(max(start, one.start), min(stop, one.stop), one)


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of a block that attend in one call: rows ``start`` to ``stop`` of the batch.

    Attributes:
        alone: the only sequence that they belong to; None where they are whole new ones.
        cu_seqlens: int32 [S + 1], where each of those begins among them.
        longest: tokens of the longest of those.
    """

    start: int
    stop: int
    alone: NewTokens | None
    cu_seqlens: Tensor | None = None
    longest: int = 0


@dataclass(frozen=True)
class PrefillBlock:
    """A run of a prefill's tokens: the prefill can be paused between blocks.

    Attributes:
        runs: its tokens, by what attends together.
        kept: rows of the batch's ``queries`` that belong to its tokens.
        last: int64, which of its tokens those are.
    """

    batch: PrefillBatch
    start: int
    stop: int
    runs: tuple[Run, ...]
    kept: slice
    last: Tensor
