"""How new tokens are stored: planned on the host for all sequences of a batch, brought to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.memory.streams import Numbers
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence, Segment
from shadowkv.kvcache.sequences.store import CachedSegment, ExactRows, exact_rows


@dataclass(frozen=True)
class StoragePlan:
    """How the new tokens of a sequence are stored, the same in every layer: on the device, so that no layer waits for a
    copy.

    Attributes:
        length: tokens of the sequence, including them.
        before, compressed: tokens that are compressed already, and those that are compressed now.
        fits: whether their segment is new: its state is to be fitted.
        state: int64 [1], the state of their segment.
        observed: int64 [1], the state that learns from their last queries: that one, or the one that is reserved for
            when a dense sequence is compressed; None where there is none.
        pages, value_pages: int64 [compressed / 64], ids of the pages that they go to.
        page_starts: int64 [compressed / 64], positions of the first tokens of these pages.
        static: where the sink and the outliers of a new segment go.
        tail: where the exact tokens that the sequence already has are; those that are compressed now come from there
            first.
        exact: where the newest tokens go: those that are not compressed, and of them as many as the window's ring
            holds.
        cached: the segments that the sequence has already.
    """

    length: int
    before: int
    compressed: int
    fits: bool
    state: Tensor
    observed: Tensor | None
    pages: Tensor
    value_pages: Tensor
    page_starts: Tensor
    static: ExactRows
    tail: ExactRows
    exact: ExactRows
    cached: tuple[CachedSegment, ...]


class StoragePlanner:
    """Plans for the sequences of a pool, and begins the segments that new tokens need."""

    def __init__(self, pool: SequencePool) -> None:
        self.pool, self.layout, self.device = pool, pool.layout, pool.store.compute

    def plan(self, work: Iterable[tuple[CachedSequence, int]]) -> list[StoragePlan]:
        """How ``count`` new tokens of each sequence are stored; it gets a new segment if a state is to be fitted on
        them."""
        numbers = Numbers()
        plans = [self._plan(numbers, sequence, count) for sequence, count in work]
        on_device = numbers.on(self.device)
        return [plan(on_device) for plan in plans]

    def _plan(self, numbers: Numbers, sequence: CachedSequence, count: int) -> Callable[[Tensor], StoragePlan]:
        """The same for one sequence, once its ``numbers`` are on the device."""
        start, before = sequence.length, sequence.compressed
        length = start + count
        after = self.layout.growth.compressed(sequence.segment_state, length, length == sequence.capacity)
        tail_ring = sequence.ring if sequence.path else sequence.dense
        tail_start = before if sequence.window is None else sequence.window_start(start) // PAGE * PAGE
        tail = exact_rows(numbers, tail_ring, tail_start, start)
        cached = [self._cached(numbers, segment) for segment in sequence.path]
        if after.fits:
            self.pool.begin_segment(sequence, length)
        compressed, reserve = after.tokens - before, sequence.compressed_reserve
        values = sequence.host_reserve if self.layout.host_fields else reserve
        pages, value_pages = (numbers.add(page_ids[: compressed // PAGE]) for page_ids in (reserve, values))
        page_starts = numbers.add(np.arange(before, before + compressed, PAGE))
        segment, reserved = sequence.path[-1] if sequence.path else None, sequence.state_reserve
        learning = None
        if after.fits and segment is not None and segment.state is not None:
            learning = segment.state
        elif segment is None and reserved:
            learning = reserved[0]
        static_tokens = segment.static_tokens if segment is not None and after.fits else 0
        static = exact_rows(numbers, segment.static if segment is not None else [], 0, static_tokens)
        ring = sequence.dense if segment is None else sequence.ring
        first_exact = after.tokens if compressed else start
        if sequence.window is not None:
            first_exact = max(start, PAGE * (-(-length // PAGE) - len(ring)))  # as many as the ring holds
        exact = exact_rows(numbers, ring, first_exact, length)
        state = numbers.add([0 if segment is None else segment.state or 0])
        observed = None if learning is None else numbers.add([learning])
        return lambda x: StoragePlan(
            length=length,
            before=before,
            compressed=compressed,
            fits=after.fits,
            state=x[state],
            observed=None if observed is None else x[observed],
            pages=x[pages],
            value_pages=x[value_pages],
            page_starts=x[page_starts],
            static=static(x),
            tail=tail(x),
            exact=exact(x),
            cached=tuple(of_segment(x) for of_segment in cached),
        )

    def _cached(self, numbers: Numbers, segment: Segment) -> Callable[[Tensor], CachedSegment]:
        """A segment that later tokens attend to in full."""
        count = len(segment.pages)
        chunks = count * PAGE // self.layout.spec.chunk
        of_segment = numbers.add([segment.slot, segment.state or 0, segment.first, count, chunks])
        pages, value_pages = numbers.add(segment.pages), numbers.add(segment.value_pages)
        static = exact_rows(numbers, segment.static, 0, segment.static_tokens)
        ids = segment.state or 0, segment.first, *segment.pages, *segment.value_pages

        def on_device(x: Tensor) -> CachedSegment:
            slot, state, first, num_pages, num_chunks = x[of_segment].split(1)
            compressed = CompressedBatch(
                slots=slot,
                states=state,
                first=first,
                pages=x[pages].unsqueeze(0),
                value_pages=x[value_pages].unsqueeze(0),
                num_pages=num_pages,
                num_chunks=num_chunks,
                budget=num_chunks,
                max_budget=chunks,
            )
            return CachedSegment(compressed, static(x), ids)

        return on_device
