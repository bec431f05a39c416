"""Data of a decode step: its plan on the host (``DecodePlan``), and its batch on the device (``DecodeBatch``), whose
shapes follow from the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import IndexPart
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.recurrent.recurrent_part import RecurrentPart
from shadowkv.kvcache.sequences.sequence import Tables
from shadowkv.ops.sampling import Sampling
from shadowkv.ops.sequence_rows import SequenceRows


class SequenceNumbers(NamedTuple):
    """Numbers of B rows, each int64 [B]. A row is a new token of a sequence; most steps have one row per sequence.

    Attributes:
        slot: the sequence's row in the tables of pages.
        length: number of tokens of the sequence before the new one.
        compressed: number of compressed tokens of the sequence.
        ring_pages: number of pages of the ring of the exact tail.
        static_pages: number of exact pages of sink and outliers.
    """

    slot: Any
    length: Any
    compressed: Any
    ring_pages: Any
    static_pages: Any


class SegmentNumbers(NamedTuple):
    """Numbers of R segments, each int64 [R].

    Attributes:
        slot: the segment's row in the tables of compressed pages.
        state: number of the segment's state.
        sequence: row of the segment's sequence in the batch.
        first, end: positions of the segment's first token and after its last.
        top_k, sampled: number of chunks to select per kv head, by top-k and by sampling.
        seed: seed of this step's sampling.
    """

    slot: Any
    state: Any
    sequence: Any
    first: Any
    end: Any
    top_k: Any
    sampled: Any
    seed: Any


_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class GroupPlan:
    """The plan of a decode step of B rows in a group of layers. Its numbers are all that the device needs.

    Attributes:
        sequences, segments: numbers of the B rows and of their R segments, in NumPy arrays. If no sequence has several
            segments, each row has one segment (R = B), which is empty if the sequence is dense.
        of_sequence: int64 [B, S], for each row the rows of its segments in ``segments``, filled up with R. None if each
            row has one segment.
        exact_pages, compressed_pages: widths of the page tables: the maximum number of exact pages of a sequence (at
            least 1), and the maximum number of compressed pages of a segment.
        max_budget: maximum number of chunks that a segment selects, by top-k and by sampling.
        selects: whether the step attends only to compressed tokens that the index selects, and not to all of them.
        micro_batches: number of micro-batches. The values of one are fetched while another computes.
        starts: int64 [n + 1], the first row of each sequence, and B (``SequenceRows``). None if the pages of a sequence
            are read by each of its rows, for example because each sequence has one row.
        segment_starts: int64 [m + 1], as ``starts`` for ``segments``: the rows of a segment follow one another. None if
            each row has one segment.
        most_rows: maximum number of rows of a sequence in ``starts``.
    """

    sequences: SequenceNumbers
    segments: SegmentNumbers
    of_sequence: np.ndarray | None
    exact_pages: int
    compressed_pages: int
    max_budget: int
    selects: bool
    micro_batches: int = 1
    starts: np.ndarray | None = None
    segment_starts: np.ndarray | None = None
    most_rows: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers from which the shapes of all tensors of the step follow."""
        columns = 1 if self.of_sequence is None else self.of_sequence.shape[1]
        counts = len(self.sequences.slot), len(self.segments.slot), columns
        starts = (0 if x is None else len(x) for x in (self.starts, self.segment_starts))
        pages = self.exact_pages, self.compressed_pages
        return (*counts, *pages, self.max_budget, self.selects, self.micro_batches, *starts, self.most_rows)

    @property
    def _others(self) -> list[np.ndarray]:
        """The arrays of ``packed`` behind the numbers of rows and segments; those that are None are empty."""
        return [_NOTHING if x is None else x for x in (self.of_sequence, self.starts, self.segment_starts)]

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays of ``packed``."""
        numbers = [(len(x), len(x.slot)) for x in (self.sequences, self.segments)]
        return [*numbers, *(x.shape for x in self._others)]

    def packed(self) -> np.ndarray:
        """All numbers in one array, int64 [n]."""
        return np.concatenate([*self.sequences, *self.segments, *(x.ravel() for x in self._others)])

    @property
    def count(self) -> int:
        """n, the size of ``packed``."""
        return sum(map(math.prod, self._shapes))

    def unpacked(
        self, numbers: Tensor
    ) -> tuple[SequenceNumbers, SegmentNumbers, Tensor | None, SequenceRows | None, SequenceRows | None]:
        """Splits ``numbers`` int64 [n], which a plan of this shape has packed. They can be on any device. Returns the
        numbers of rows and of segments, ``of_sequence``, and the rows of sequences and of segments."""
        shapes = self._shapes
        split = numbers.split(list(map(math.prod, shapes)))
        sequences, segments, of_sequence, *starts = (x.view(shape) for x, shape in zip(split, shapes, strict=True))
        rows, of_segments = (SequenceRows(x, self.most_rows) if len(x) else None for x in starts)
        if self.of_sequence is None:
            # Not the same object: exact and compressed tokens are attended to on two streams, and it keeps what it has
            # computed.
            same = None if rows is None else replace(rows)
            return SequenceNumbers(*sequences), SegmentNumbers(*segments), None, rows, same
        return SequenceNumbers(*sequences), SegmentNumbers(*segments), of_sequence, rows, of_segments


@dataclass(frozen=True)
class DecodePlan:
    """The plan of a decode step of B rows, for all layers.

    Attributes:
        groups: the plans of all groups of layers.
        recurrent: int64 [2, B], rows of the recurrent states before and after each row's token; None if no layer has a
            recurrent state.
        drafted: whether a sequence with recurrent states can have several rows, which are then computed in order.
    """

    groups: tuple[GroupPlan, ...]
    recurrent: np.ndarray | None = None
    drafted: bool = False

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches, the same in all groups of layers."""
        return self.groups[0].micro_batches

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers from which the shapes of all tensors of the step follow."""
        return sum((group.shape for group in self.groups), ())

    @property
    def num_rows(self) -> int:
        """B, the number of rows."""
        return len(self.groups[0].sequences.slot)

    def packed(self) -> np.ndarray:
        """All numbers in one array, int64 [n], group by group, then those of recurrent states."""
        recurrent = () if self.recurrent is None else (self.recurrent.ravel(),)
        return np.concatenate([*(group.packed() for group in self.groups), *recurrent])

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Splits ``numbers`` int64 [n], which a plan of this shape has packed, into those of each group, and of
        recurrent states if there are any."""
        recurrent = () if self.recurrent is None else (self.recurrent.size,)
        return numbers.split([*(group.count for group in self.groups), *recurrent])


@dataclass(frozen=True)
class DecodeBatch:
    """A decode step of B rows in a group of layers, on the device. It is a ``batch.Part``.

    Attributes:
        positions: int64 [B], position of each new token.
        pages: int64 [B, E], ids of the exact pages, at most E for each sequence.
        counts: int64 [B, E], number of valid tokens of each exact page, including the new token.
        exact_numbers: int64 [B, E], for each exact page, its number in the sequence; arbitrary if it has no valid
            tokens. None without an indexer.
        starts: int64 [B, E], for each exact page, its first token in the window, counted from the page's start. None
            without a window.
        write_page: int64 [B], id of the exact page that the new token is written to.
        write_offset: int64 [B], row of the new token in this page.
        compressed: the compressed pages of R segments; None if there are none.
        sequence: int64 [R], row of the batch that each row of ``compressed`` belongs to. None if ``compressed`` has the
            same rows as the batch.
        of_sequence: int64 [B, S], for each row of the batch, its rows in ``compressed``, filled up with R. None if each
            row of the batch has at most one.
        rows: which rows belong to one sequence; None if each row reads its pages.
    """

    positions: Tensor
    pages: Tensor
    counts: Tensor
    write_page: Tensor
    write_offset: Tensor
    compressed: CompressedBatch | None
    sequence: Tensor | None = None
    of_sequence: Tensor | None = None
    starts: Tensor | None = None
    exact_numbers: Tensor | None = None
    rows: SequenceRows | None = None

    @property
    def num_tokens(self) -> int:
        """B, the number of rows."""
        return len(self.positions)

    def of_compressed(self, x: Tensor) -> Tensor:
        """Returns, for each row of ``compressed``, its sequence's row of ``x`` [B, ...]: [R, ...]."""
        return x if self.sequence is None else x[self.sequence]

    def split(self, count: int) -> list[DecodeBatch]:
        """Splits the rows into ``count`` micro-batches. ``count`` is at most the number of rows."""
        bounds = [part * len(self.positions) // count for part in range(count + 1)]
        return [self._rows(slice(start, stop)) for start, stop in pairwise(bounds)]

    def _rows(self, rows: slice) -> DecodeBatch:
        assert self.sequence is None  # with micro-batches every row has one segment
        return DecodeBatch(
            self.positions[rows],
            self.pages[rows],
            self.counts[rows],
            self.write_page[rows],
            self.write_offset[rows],
            None if self.compressed is None else replace(self.compressed.part(rows), overlapped=True),
            starts=None if self.starts is None else self.starts[rows],
            exact_numbers=None if self.exact_numbers is None else self.exact_numbers[rows],
        )


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Splits a step into ``count`` micro-batches, at most the number of rows. Only policies with values on the host
    have more than one."""
    if count == 1:
        return [batch]
    of_groups = [cast(DecodeBatch | RecurrentPart, part).split(count) for (part,) in batch.groups]
    return [Batch(tuple((part,) for part in of_all)) for of_all in zip(*of_groups, strict=True)]


def batch_of(
    plan: GroupPlan, numbers: Tensor, index: IndexPart, tables: Tables, window: int | None = None
) -> DecodeBatch:
    """Makes the batch on the device, from a plan's shapes and packed numbers int64 [n].

    Only shapes are taken from ``plan``, so a graph that captures this function serves other plans of the same shapes.
    """
    sequences, segments, of_sequence, rows, of_segments = plan.unpacked(numbers)
    slot, length, _, ring, static_pages = sequences
    pages = tables.exact[slot, : plan.exact_pages].long()
    starts, counts = None, _exact_counts(sequences, tables.static_counts[slot, : plan.exact_pages])
    if window is not None:
        starts, counts = _in_window(length, ring, plan.exact_pages, window)
    compressed = sequence = None
    if plan.compressed_pages:
        # On a GPU shapes must not depend on which rows are empty, because steps are captured in graphs. Micro-batches
        # are slices of all rows, so they keep the empty ones too.
        nonempty = segments.end > segments.first
        if of_sequence is not None:
            sequence = segments.sequence
        elif numbers.device.type == "cpu" and plan.micro_batches == 1 and not nonempty.all():
            sequence = nonempty.nonzero().squeeze(1)
            segments = SegmentNumbers(*(x[sequence] for x in segments))
            if of_segments is not None:
                before = torch.nn.functional.pad(nonempty.cumsum(0), (1, 0))  # nonempty rows before each row
                of_segments = replace(of_segments, starts=before[of_segments.starts])
        compressed = _compressed_batch(plan, segments, of_segments, index, tables)
    return DecodeBatch(
        length,
        pages,
        counts,
        pages.gather(1, (static_pages + length // PAGE % ring)[:, None]).squeeze(1),
        length % PAGE,
        compressed,
        sequence,
        of_sequence,
        starts=starts,
        exact_numbers=_exact_numbers(sequences, plan.exact_pages) if index.spec.native else None,
        rows=rows,
    )


def _compressed_batch(
    plan: GroupPlan, segments: SegmentNumbers, of_segments: SequenceRows | None, index: IndexPart, tables: Tables
) -> CompressedBatch:
    spec = index.spec
    pages = value_pages = tables.pages[segments.slot, : plan.compressed_pages].long()
    if spec.place == "host":  # otherwise keys and values share one tensor, so kernels look up each page once
        value_pages = tables.value_pages[segments.slot, : plan.compressed_pages].long()
    tokens, span = segments.end - segments.first, None
    if not plan.selects:
        span = (segments.first == 0) * (spec.sink_chunks * spec.chunk), tokens
    return CompressedBatch(
        slots=segments.slot,
        states=segments.state,
        first=segments.first,
        pages=pages,
        value_pages=value_pages,
        num_pages=tokens // PAGE,
        num_chunks=tokens // spec.chunk,
        budget=segments.top_k,
        max_budget=plan.max_budget,
        sampling=Sampling(segments.sampled, segments.seed) if index.sampled and plan.selects else None,
        span=span,
        of_segments=None if plan.selects else of_segments,
        most=segments.top_k + segments.sampled if plan.selects else None,
    )


def _exact_numbers(numbers: SequenceNumbers, width: int) -> Tensor:
    """Returns the number of each exact page [B, ``width``] in its sequence. With an indexer there are no static
    pages."""
    oldest = numbers.compressed[:, None] // PAGE
    column = torch.arange(width, device=oldest.device)
    return oldest + (column - oldest) % numbers.ring_pages[:, None]


def _exact_counts(numbers: SequenceNumbers, static: Tensor) -> Tensor:
    """Returns the number of valid tokens in each exact page, int64 [B, E]. The static pages come first and have
    ``static`` [B, E] tokens. The pages of the ring, which holds the tail, follow."""
    _, length, compressed, ring_pages, static_pages = numbers
    column = torch.arange(static.shape[1], device=static.device)
    ring, first = ring_pages[:, None], static_pages[:, None]
    age = (column - first - compressed[:, None] // PAGE) % ring  # number of pages after the tail's oldest page
    in_ring = (column >= first) & (column < first + ring)
    tail = (length + 1 - compressed)[:, None]
    counts = torch.where(in_ring, tail - PAGE * age, torch.where(column < first, static, 0))
    return counts.clamp(0, PAGE)


def _in_window(length: Tensor, ring_pages: Tensor, width: int, window: int) -> tuple[Tensor, Tensor]:
    """Returns, for each ring page [B, E], its first token in the window, and its last + 1, both counted from the page's
    start. The window is that of the token at position ``length`` [B]."""
    column, newest = torch.arange(width, device=length.device), (length // PAGE)[:, None]
    page = newest - (newest - column) % ring_pages[:, None]  # page number in the sequence, below 0 for an unused page
    seen = (page >= 0) & (column < ring_pages[:, None])
    first, last = (length - window + 1)[:, None] - PAGE * page, (length + 1)[:, None] - PAGE * page
    return first.clamp(0, PAGE), last.clamp(0, PAGE).where(seen, 0)
