"""Storage plans: where a prompt's new tokens are stored. ``Storing`` and prefill use them.

The plans are made on the host for all sequences of a batch, and copied to the device together.
"""

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
    """The storage plan of a sequence's new tokens. It is the same for every layer, and its tensors are on the device,
    so no layer waits for a copy.

    Attributes:
        length: number of tokens of the sequence, including the new ones.
        before: number of tokens that are already compressed.
        compressed: number of tokens that are compressed now.
        fits: whether the tokens that are compressed now form a new segment, whose state must be fitted.
        state: int64 [1], the state of the last segment.
        observed: int64 [1], the state that learns from the new tokens' last queries: the state of a new segment, or the
            state reserved for a dense sequence. None if no state learns.
        pages, value_pages: int64 [compressed / 64], ids of the pages for the compressed tokens.
        page_starts: int64 [compressed / 64], positions of the first tokens of these pages.
        static: exact rows for the sink and the outliers of a new segment.
        tail: exact rows of the sequence's current exact tail. The tokens that are compressed now begin with the tail.
        exact: exact rows for the new tokens that are not compressed; with a window, for as many of them as the ring
            holds.
        cached: the segments that the sequence already has.
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
    """Makes storage plans for the sequences of a pool, and starts the segments that new tokens need."""

    def __init__(self, pool: SequencePool) -> None:
        self.pool, self.layout, self.device = pool, pool.layout, pool.store.compute

    def plan(self, work: Iterable[tuple[CachedSequence, int]]) -> list[StoragePlan]:
        """Plans the storage of new tokens. ``work`` has pairs of a sequence and its number of new tokens. A sequence
        gets a new segment if a state must be fitted."""
        numbers = Numbers()
        plans = [self._plan(numbers, sequence, count) for sequence, count in work]
        on_device = numbers.on(self.device)
        return [plan(on_device) for plan in plans]

    def _plan(self, numbers: Numbers, sequence: CachedSequence, count: int) -> Callable[[Tensor], StoragePlan]:
        """Adds a sequence's numbers to ``numbers``. Returns a function that makes the sequence's plan from the copy of
        all numbers on the device."""
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
            first_exact = max(start, PAGE * (-(-length // PAGE) - len(ring)))  # as many tokens as the ring holds
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
        """Adds the numbers of an earlier segment to ``numbers``. Returns a function that makes the segment from their
        copy on the device. The budget is all chunks, because new tokens attend to all tokens of the segment."""
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
