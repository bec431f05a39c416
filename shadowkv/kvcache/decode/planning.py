"""``DecodePlanner``: plans decode steps on the host, and compresses the pages that are due before them.
``KVCache`` calls it.

A plan's numbers are all that the device needs. ``rounded`` rounds up shapes, so that few captured graphs serve many
steps; padding rows use the padding slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.compression.storing import Storing
from shadowkv.kvcache.decode.decode_batch import GroupPlan, SegmentNumbers, SequenceNumbers
from shadowkv.kvcache.decode.fetching import Fetching
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.sequences.sequence import CachedSequence, Tables
from shadowkv.ops.sampling import row_seeds

NARROW = 4
"""Where every step selects, a draft step selects this many times less (``QualityMeter``)."""


class DecodePlanner:
    """Plans decode steps of a pool's sequences.

    Args:
        storing: compresses tails that have outgrown their state: the state is no longer valid for them (``growth.py``).
        fetching: fetches values from the host; None if values are on the device.
    """

    def __init__(self, storing: Storing, fetching: Fetching | None) -> None:
        self.storing, self.fetching = storing, fetching
        self.pool, self.compression, self.layout = storing.pool, storing.compression, storing.layout
        self.tables, self.spec = storing.pool.tables, storing.spec

    def plan(
        self,
        sequences: Sequence[CachedSequence],
        counts: Sequence[int] | None = None,
        drafting: bool = False,
        compress: Callable[[np.ndarray, Callable[[Tensor], None]], None] | None = None,
    ) -> GroupPlan:
        """Plans a step of ``sequences``. First turns tails that have outgrown their state into segments, and compresses
        the pages that are due.

        Args:
            counts: number of new tokens of each sequence, at most ``most_tokens``. None for one token each. A sequence
                has a row for each of its new tokens. Row j attends to the tokens up to its own, as it would in a step
                of its own after j other steps.
            drafting: whether the step is a draft step, in which the index selects, if the policy has an index. If the
                index selects in every step, it selects 1 / ``NARROW`` as much in a draft step.
            compress: as for ``KVCache.plan_decode``, without the group's number.

        Raises ValueError if a sequence has no room for its new tokens.
        """
        tables, spec = self.tables, self.spec
        for sequence in sequences:
            self.pool.await_layers(sequence)
        slots = np.fromiter((sequence.slot for sequence in sequences), np.int64, len(sequences))
        room = self._capacity(sequences) - tables.length[slots]
        new = np.ones_like(slots) if counts is None else np.asarray(counts, np.int64)
        if (room < new).any():
            raise ValueError(f"a sequence has no room for its new tokens: there is room for {room}, and {new} are new")
        if spec.compresses:
            outgrown = self._outgrown(slots)
            if outgrown.any():
                self.storing.compress_tails([sequences[int(row)] for row in outgrown.nonzero()[0]])
            due = self.compression.due(slots)
            if due.any():
                pages, function = self.compression.numbers(slots[due]), self.compression.compress_pages
                if compress is None:
                    function(upload(torch.from_numpy(pages), self.pool.store.compute))
                else:
                    compress(padded(pages, self.compression.padding), function)
                # Recorded only now: pages whose compression raised an error are due again in the next plan.
                for row in map(int, due.nonzero()[0]):
                    self.pool.compress(sequences[row], sequences[row].compressed + PAGE)
        names = "length", "compressed", "ring_pages", "static_pages"
        rows = slots if counts is None else slots.repeat(new)
        numbers = SequenceNumbers(rows, *(getattr(tables, name)[rows] for name in names))
        if counts is not None:
            own = np.arange(len(rows)) - (new.cumsum() - new).repeat(new)  # index of each row within its sequence
            numbers = numbers._replace(length=numbers.length + own)
        exact_pages = int((numbers.static_pages + tables.ring_widths(rows, numbers.length)).max())
        selects = spec.selects or (drafting and spec.has_index)
        starts, most_rows = self._starts(new, exact_pages, bool(numbers.compressed.any()) and not selects)
        segments, of_sequence, segment_starts = self._segments(numbers, starts, drafting and spec.selects)
        budget = segments.top_k + segments.sampled
        return GroupPlan(
            numbers,
            segments,
            of_sequence,
            exact_pages,
            int((segments.end - segments.first).max()) // PAGE,
            int(budget.max()),
            selects,
            1 if self.fetching is None or of_sequence is not None else self.fetching.micro_batches(budget),
            starts,
            segment_starts,
            most_rows,
        )

    def _starts(self, new: np.ndarray, exact_pages: int, reads_compressed: bool) -> tuple[np.ndarray | None, int]:
        """Returns ``GroupPlan.starts`` and ``most_rows`` of a step with ``new`` int64 [n] rows of each sequence.

        Args:
            exact_pages: maximum number of exact pages of a sequence.
            reads_compressed: whether the step attends to all compressed tokens.
        """
        long, most = exact_pages > MIN_EXACT_PAGES or reads_compressed, int(new.max())
        if not long or self.layout.window is not None or most == 1 or most * len(new) > MOST_ROOM * new.sum():
            return None, 1
        return np.concatenate(([0], new.cumsum())), 1 << (most - 1).bit_length()  # a row that is not there is free

    def most_tokens(self, sequences: Sequence[CachedSequence]) -> np.ndarray:
        """Maximum number of new tokens, int64 [n], that a step can append to each sequence.

        The number is limited by the sequence's capacity and by the ring of a window. The new tokens also end before the
        next compression is due, so that every token attends to the same tokens as in a step of its own.
        """
        tables = self.tables
        slots = np.fromiter((sequence.slot for sequence in sequences), np.int64, len(sequences))
        most = np.minimum(self._capacity(sequences) - tables.length[slots], PAGE)
        if self.spec.compresses:
            compressed = tables.compressed[slots] + PAGE * self.compression.due(slots)
            valid = (tables.segments[slots] > 0) & (compressed + PAGE <= tables.valid_until[slots])
            limit = np.where(valid, self.spec.local + PAGE, self._late_limit(slots))
            before = np.where(self._outgrown(slots), 1, compressed + limit - tables.length[slots])
            most = np.minimum(most, before)
        return most

    def _capacity(self, sequences: Sequence[CachedSequence]) -> np.ndarray:
        return np.fromiter((sequence.capacity for sequence in sequences), np.int64, len(sequences))

    def _late_limit(self, slots: np.ndarray) -> np.ndarray:
        growth = self.layout.growth
        return np.where(self.tables.segments[slots] > 0, growth.late_limit(1), growth.late_limit(0))

    def _outgrown(self, slots: np.ndarray) -> np.ndarray:
        """Returns which tails have outgrown their state, bool [n]."""
        tables = self.tables
        tail = tables.length[slots] - tables.compressed[slots]
        return (tables.compressed[slots] + PAGE > tables.valid_until[slots]) & (tail >= self._late_limit(slots))

    def forecast(
        self, sequences: Sequence[CachedSequence], joining: Sequence[tuple[CachedSequence, int]]
    ) -> GroupPlan | None:
        """Plans a step of padding rows with the shapes of the next step of ``sequences`` and ``joining``.

        Returns None if the shapes cannot be predicted: if a sequence has several segments, or if values are fetched
        from the host, where the number of micro-batches changes the shapes.

        Args:
            joining: sequences whose prompts are being computed, with the prompts' lengths.
        """
        if self.fetching is not None:
            return None
        tables, layout = self.tables, self.layout
        slots = np.fromiter((one.slot for one in sequences), np.int64, len(sequences))
        segments = int(tables.segments[slots].max(initial=0))
        exact = int((tables.static_pages[slots] + tables.ring_widths(slots, tables.length[slots])).max(initial=0))
        compressed = int(tables.compressed[slots].max(initial=0))
        for sequence, length in joining:
            at = sequence.segment_state
            after = layout.growth.compressed(at, length, length == sequence.capacity)
            segments = max(segments, at.segments + after.fits)
            static = len(sequence.static) if at.segments else self.spec.static_pages
            after_compression = static + len(sequence.ring)
            dense = length // PAGE + 1
            if sequence.window is not None:
                dense = min(dense, len(sequence.dense))
            exact = max(exact, after_compression if after.tokens else dense)
            compressed = max(compressed, after.tokens)
        if segments > 1:
            return None
        return GroupPlan(
            *padding_rows(tables, len(sequences) + len(joining)),
            None,
            exact,
            compressed // PAGE,
            0,
            self.spec.selects,
        )

    def forecast_drafts(self, plan: GroupPlan, sequences: int, rows: int, drafting: bool) -> GroupPlan:
        """Returns the plan of a step of padding rows, whose sequences are as long as those of ``plan``.

        Args:
            plan: what ``forecast`` has returned.
            sequences, rows: number of sequences, and of each sequence's rows.
            drafting: whether the step is a draft step, as for ``plan``.
        """
        selects = self.spec.selects or (drafting and self.spec.has_index)
        reads_compressed = bool(plan.compressed_pages) and not selects
        starts, most_rows = self._starts(np.full(sequences, rows), plan.exact_pages, reads_compressed)
        padding, padding_segments = padding_rows(self.tables, sequences * rows)
        return replace(
            plan, sequences=padding, segments=padding_segments, selects=selects, starts=starts, most_rows=most_rows
        )

    def _segments(
        self, numbers: SequenceNumbers, starts: np.ndarray | None, narrow: bool
    ) -> tuple[SegmentNumbers, np.ndarray | None, np.ndarray | None]:
        """Returns the segments of a batch, ``GroupPlan.of_sequence`` and ``GroupPlan.segment_starts``. ``starts`` are
        the plan's. If ``narrow``, the budget is divided by ``NARROW``."""
        tables, spec = self.tables, self.spec
        count, slots = tables.segments[numbers.slot], numbers.slot
        if count.max() <= 1:
            sequence, last, of_sequence, segment_starts = np.arange(len(slots)), True, None, None
            slot = np.where(count > 0, tables.segment_slots[slots, 0], tables.padding_segment_slot)
        else:
            has_segment = np.arange(count.max()) < count[:, None]
            sequence, number = has_segment.nonzero()
            segment_starts = None
            if starts is not None:  # the rows of a segment follow one another
                new = np.diff(starts)
                order = np.lexsort((sequence, number, np.arange(len(new)).repeat(new)[sequence]))
                sequence, number = sequence[order], number[order]
                of_each = count[starts[:-1]]  # segments of each sequence
                segment_starts = np.concatenate(([0], new.repeat(of_each).cumsum()))
            of_sequence = np.full(has_segment.shape, count.sum())
            of_sequence[sequence, number] = np.arange(len(sequence))
            slot, last = tables.segment_slots[slots[sequence], number], number == count[sequence] - 1
        first, end = tables.first[slot], tables.end[slot]
        length = numbers.length[sequence]
        if isinstance(spec.budget, float):
            budget = spec.budget_chunks(np.where(last, length, end) - first)
        elif spec.native:  # all blocks that the sequence selects may be in one segment
            budget = spec.budget_chunks(length)
        else:  # the budget is for the whole sequence, and segments share it by length
            whole = spec.budget_chunks(length)
            budget = -(-whole * (end - first) // np.maximum(1, numbers.compressed[sequence]))
        # ``rounded`` leaves room for this many chunks. Without the limit, a long tail that is not compressed yet would
        # raise the budget of the last segment further.
        budget = np.minimum(budget, spec.budget_chunks(end - first + spec.local + PAGE))
        budget = -(-budget // NARROW) if narrow else budget
        budget = np.where(end > first, budget, 0)
        sampled = self.layout.parts.index.sampled_chunks(budget, end - first - tables.static_tokens[slot])
        seed = row_seeds(tables.seed[slots[sequence]], numbers.length[sequence], first)
        segments = SegmentNumbers(slot, tables.state[slot], sequence, first, end, budget - sampled, sampled, seed)
        return segments, of_sequence, segment_starts

    def end(self, plan: GroupPlan) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        np.add.at(self.tables.length, plan.sequences.slot, 1)  # a sequence has a row for each new token
        if self.fetching is not None:
            self.fetching.publish()


MOST_ROOM = 2
"""Rows of a sequence read its pages together if the sequences would have at most this many times the step's rows, with
as many rows for each as for the longest draft. Drafts of very different lengths would need many CUDA graphs. Steps of
short dense sequences read little, and have the graphs that are captured at start (``MIN_EXACT_PAGES``)."""

MIN_PAGES = 8
"""Minimum width of a page table for compressed pages."""

MIN_EXACT_PAGES = 32
"""Minimum width of a page table for exact pages: a warp reads this many page ids at once. Larger widths are rounded up
to powers of 2. This costs little, because kernels skip empty entries 32 at a time. So the shapes of short sequences
differ only in the batch size, and few graphs serve all of them."""


def round_up(count: int) -> int:
    """Rounds ``count`` up to the next of 1, 2, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 …, at most a quarter more."""
    step = max(1, 2 ** (count.bit_length() - 3))
    return -(-count // step) * step


def padding_numbers(tables: Tables) -> tuple[SequenceNumbers, SegmentNumbers]:
    """Returns the numbers of a padding row: of a sequence with a ring of one page, and of its empty segment."""
    slot = tables.padding_segment_slot
    return SequenceNumbers(tables.padding_slot, 0, 0, 1, 0), SegmentNumbers(slot, tables.state[slot], 0, 0, 0, 0, 0, 0)


def padding_rows(tables: Tables, count: int) -> tuple[SequenceNumbers, SegmentNumbers]:
    """Returns the numbers of ``count`` padding rows."""
    sequence, segment = (np.repeat(np.array(one)[:, None], count, axis=1) for one in padding_numbers(tables))
    return SequenceNumbers(*sequence), SegmentNumbers(*segment)


def rounded(plan: GroupPlan, spec: KVSpec, tables: Tables, batch: int) -> GroupPlan:
    """Returns ``plan`` with shapes rounded up and ``batch`` rows."""
    count, rows, most = plan.shape[:3]
    exact = min(1 << (max(plan.exact_pages, MIN_EXACT_PAGES) - 1).bit_length(), tables.exact.shape[1])
    compressed = plan.compressed_pages and min(round_up(max(plan.compressed_pages, MIN_PAGES)), tables.pages.shape[1])
    budget = int(spec.budget_chunks(np.asarray(compressed * PAGE + spec.local + PAGE))) if compressed else 0
    sequence, segment = padding_numbers(tables)
    of_sequence = plan.of_sequence
    if of_sequence is None:
        padded_rows, owner = batch, np.arange(count, batch)
    else:
        # Numbers of segments are rounded up like batch sizes, so that sequences can gain segments before the shape
        # changes.
        padded_rows, owner, columns = round_up(max(rows, batch + 1)), np.array(0), round_up(most)
        none = np.full((batch, columns), padded_rows)
        none[:count, :most] = np.where(of_sequence < rows, of_sequence, padded_rows)
        of_sequence = none
    starts, segment_starts = (
        None if x is None else _padded_starts(x, plan.most_rows, up_to)
        for x, up_to in ((plan.starts, batch), (plan.segment_starts, padded_rows))
    )
    return replace(
        plan,
        sequences=SequenceNumbers(*_padded(plan.sequences, sequence, batch)),
        segments=SegmentNumbers(*_padded(plan.segments, segment._replace(sequence=owner), padded_rows)),
        of_sequence=of_sequence,
        exact_pages=exact,
        compressed_pages=compressed,
        max_budget=budget,
        starts=starts,
        segment_starts=segment_starts,
    )


def _padded_starts(starts: np.ndarray, most_rows: int, rows: int) -> np.ndarray:
    """Adds sequences of padding rows to ``starts`` int64 [n + 1], until there are ``rows`` rows. Then adds sequences
    without rows, until their number is one that ``round_up`` returns. At least one is added to a single sequence, so
    that its steps with and without padding rows have the same shape."""
    count, used = len(starts) - 1, int(starts[-1])
    more = round_up(max(count - (used - rows) // most_rows, 2)) - count
    return np.concatenate((starts, np.minimum(used + most_rows * np.arange(1, more + 1), rows)))


def padded(numbers: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Pads the numbers of n pages to compress, int64 [6, n]: ``padding``, int64 [6], is appended as a column until the
    number of columns is one that ``round_up`` returns."""
    more = round_up(numbers.shape[1]) - numbers.shape[1]
    return np.concatenate((numbers, np.repeat(padding[:, None], more, axis=1)), axis=1)


def _padded(numbers: tuple[np.ndarray, ...], more: tuple[object, ...], count: int) -> list[np.ndarray]:
    width = count - len(numbers[0])
    return [np.concatenate((x, np.broadcast_to(np.asarray(y), (width,)))) for x, y in zip(numbers, more, strict=True)]
