"""A decode step: its plan, as the host knows it, and its batch, as the device sees it, whose shapes the plan fixes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.policy.spec import PAGE, KVSpec
from shadowkv.kvcache.sequences.sequence import Tables
from shadowkv.ops.sampling import Sampling


class SequenceNumbers(NamedTuple):
    """For each of B sequences, int64 [B]: its slot, tokens cached, tokens compressed, pages of the ring, static
    pages."""

    slot: Any
    length: Any
    compressed: Any
    ring_pages: Any
    static_pages: Any


class SegmentNumbers(NamedTuple):
    """For each of R segments, int64 [R]: its slot in the page tables, its state, its sequence in the batch, the
    positions of its first token and after its last, chunks to select by top-k and by sampling per kv head, and the seed
    of what is sampled in this step."""

    slot: Any
    state: Any
    sequence: Any
    first: Any
    end: Any
    top_k: Any
    sampled: Any
    seed: Any


@dataclass(frozen=True)
class GroupPlan:
    """One more token for each of B sequences in a group of layers, as the host knows it: all that the device needs is
    in the numbers.

    Attributes:
        sequences, segments: NumPy arrays. Where no sequence has more than one segment there is one of each, R = B,
            empty where the sequence is dense.
        of_sequence: int64 [B, S], which segments a sequence has, R for none; None where there is one of each.
        exact_pages, compressed_pages: pages of the longest sequence and segment, at least 1 and 0; the widths of the
            page tables.
        max_budget: chunks that any segment may select, top-k and sampled.
        micro_batches: parts of the rows that go through the layers one after the other, so that values of one are
            fetched while another computes.
        compression: int64 [6, n], pages to be compressed before the step (``Compression.compress_pages``); None where
            there are none.
    """

    sequences: SequenceNumbers
    segments: SegmentNumbers
    of_sequence: np.ndarray | None
    exact_pages: int
    compressed_pages: int
    max_budget: int
    micro_batches: int = 1
    compression: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Determines the shapes of all tensors of a step."""
        columns = 1 if self.of_sequence is None else self.of_sequence.shape[1]
        counts = len(self.sequences.slot), len(self.segments.slot), columns
        return (*counts, self.exact_pages, self.compressed_pages, self.max_budget, self.micro_batches)

    def packed(self) -> np.ndarray:
        """All numbers in one array, int64 [n]."""
        of_sequence = () if self.of_sequence is None else (self.of_sequence.ravel(),)
        return np.concatenate((*self.sequences, *self.segments, *of_sequence))

    @property
    def count(self) -> int:
        """How many numbers there are, n."""
        of_sequence = 0 if self.of_sequence is None else self.of_sequence.size
        return 5 * len(self.sequences.slot) + 8 * len(self.segments.slot) + of_sequence

    def unpacked(self, numbers: Tensor) -> tuple[SequenceNumbers, SegmentNumbers, Tensor | None]:
        """Splits ``numbers`` int64 [n], packed by a plan of this shape, on any device."""
        count, rows, columns = self.shape[:3]
        sequences, segments, rest = numbers.split((5 * count, 8 * rows, len(numbers) - 5 * count - 8 * rows))
        of_sequence = None if self.of_sequence is None else rest[: count * columns].view(count, columns)
        return SequenceNumbers(*sequences.view(5, -1)), SegmentNumbers(*segments.view(8, -1)), of_sequence


@dataclass(frozen=True)
class DecodePlan:
    """One more token for each of B sequences: the plans of all groups of layers."""

    groups: tuple[GroupPlan, ...]

    @property
    def micro_batches(self) -> int:
        """Parts of the rows that go through the layers one after the other, the same in all groups."""
        return self.groups[0].micro_batches

    @property
    def shape(self) -> tuple[int, ...]:
        """Determines the shapes of all tensors of a step."""
        return sum((group.shape for group in self.groups), ())

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.groups[0].sequences.slot)

    def packed(self) -> np.ndarray:
        """All numbers in one array, int64 [n], group by group."""
        return np.concatenate([group.packed() for group in self.groups])

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """``numbers`` int64 [n], packed by a plan of this shape, on any device: those of each group."""
        return numbers.split([group.count for group in self.groups])


@dataclass(frozen=True)
class DecodeBatch:
    """One new token for each of B sequences of any lengths in a group of layers, as the device sees it.

    Attributes:
        positions: int64 [B], position of each new token.
        pages: int64 [B, E], ids of the exact pages.
        counts: int64 [B, E], valid tokens of each exact page, the new one included.
        starts: int64 [B, E], with a window, the first token of each page that is in it, of those; else None.
        write_page: int64 [B], id of the exact page that takes the new token.
        write_offset: int64 [B], its row there.
        compressed: None where no row has compressed pages.
        sequence: int64 [R], the row of the batch that each row of ``compressed`` belongs to; None where they are the
            same.
        of_sequence: int64 [B, S], which rows of ``compressed`` each row of the batch has, R for none; None where each
            has at most one.
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

    @property
    def num_tokens(self) -> int:
        """B."""
        return len(self.positions)

    def of_compressed(self, x: Tensor) -> Tensor:
        """[R, ...] of [B, ...], for the rows of ``compressed``."""
        return x if self.sequence is None else x[self.sequence]

    def split(self, count: int) -> list[DecodeBatch]:
        """``count`` micro-batches, at most as many as rows."""
        bounds = [part * len(self.positions) // count for part in range(count + 1)]
        return [self._rows(slice(start, stop)) for start, stop in pairwise(bounds)]

    def _rows(self, rows: slice) -> DecodeBatch:
        assert self.sequence is None  # every row has one segment where there are micro-batches
        return DecodeBatch(
            self.positions[rows],
            self.pages[rows],
            self.counts[rows],
            self.write_page[rows],
            self.write_offset[rows],
            None if self.compressed is None else replace(self.compressed.part(rows), overlapped=True),
            starts=None if self.starts is None else self.starts[rows],
        )


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """``count`` parts of a step, at most as many as rows; more than one only for values on the host."""
    if count == 1:
        return [batch]
    of_groups = [cast(DecodeBatch, part).split(count) for (part,) in batch.groups]
    return [Batch(tuple((part,) for part in of_all)) for of_all in zip(*of_groups, strict=True)]


def batch_of(plan: GroupPlan, numbers: Tensor, spec: KVSpec, tables: Tables, window: int | None = None) -> DecodeBatch:
    """The batch of a plan of these shapes whose numbers, packed, are ``numbers`` int64 [n] on the device: only shapes
    are taken from ``plan``, so that the result can be captured in a graph and used for other plans of the same
    shapes."""
    sequences, segments, of_sequence = plan.unpacked(numbers)
    slot, length, _, ring, static_pages = sequences
    pages = tables.exact[slot, : plan.exact_pages].long()
    starts, counts = None, _exact_counts(sequences, tables.static_counts[slot, : plan.exact_pages])
    if window is not None:
        starts, counts = _in_window(length, ring, plan.exact_pages, window)
    compressed = sequence = None
    if plan.compressed_pages:
        # On a GPU shapes may not depend on which rows are empty, as steps are captured in graphs; micro-batches,
        # which only a GPU uses, are cut by rows of the whole batch.
        nonempty = segments.end > segments.first
        if of_sequence is not None:
            sequence = segments.sequence
        elif numbers.device.type == "cpu" and plan.micro_batches == 1 and not nonempty.all():
            sequence = nonempty.nonzero().squeeze(1)
            segments = SegmentNumbers(*(x[sequence] for x in segments))
        compressed = _compressed_batch(plan, segments, spec, tables)
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
    )


def _compressed_batch(plan: GroupPlan, segments: SegmentNumbers, spec: KVSpec, tables: Tables) -> CompressedBatch:
    pages = value_pages = tables.pages[segments.slot, : plan.compressed_pages].long()
    if spec.place == "host":  # otherwise a single tensor tells kernels to look each page up only once
        value_pages = tables.value_pages[segments.slot, : plan.compressed_pages].long()
    tokens, span = segments.end - segments.first, None
    if not spec.selects:
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
        sampling=Sampling(segments.sampled, segments.seed) if spec.sampled else None,
        span=span,
        most=segments.top_k + segments.sampled if spec.selects else None,
    )


def _exact_counts(numbers: SequenceNumbers, static: Tensor) -> Tensor:
    """Valid tokens int64 [B, E] of each exact page: first ``static`` [B, E], then the ring that holds the tail."""
    _, length, compressed, ring_pages, static_pages = numbers
    column = torch.arange(static.shape[1], device=static.device)
    ring, first = ring_pages[:, None], static_pages[:, None]
    age = (column - first - compressed[:, None] // PAGE) % ring  # how many pages after the tail's oldest
    in_ring = (column >= first) & (column < first + ring)
    tail = (length + 1 - compressed)[:, None]
    counts = torch.where(in_ring, tail - PAGE * age, torch.where(column < first, static, 0))
    return counts.clamp(0, PAGE)


def _in_window(length: Tensor, ring_pages: Tensor, width: int, window: int) -> tuple[Tensor, Tensor]:
    """The first token of each page [B, E] of rings [B] that is in the window of the token at position ``length`` [B],
    and the one after the last."""
    column, newest = torch.arange(width, device=length.device), (length // PAGE)[:, None]
    page = newest - (newest - column) % ring_pages[:, None]  # its number in the sequence, below 0 where it has none
    seen = (page >= 0) & (column < ring_pages[:, None])
    first, last = (length - window + 1)[:, None] - PAGE * page, (length + 1)[:, None] - PAGE * page
    return first.clamp(0, PAGE), last.clamp(0, PAGE).where(seen, 0)
