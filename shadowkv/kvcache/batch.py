"""What one forward pass tells the cache: which tokens of which sequences, as tensors over the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.sequence import Segment, Sequence
from shadowkv.kvcache.shape import ModelShape
from shadowkv.ops.select_by_sketch.draws import Draws

OBSERVED = 64
"""Newest queries of a prompt that an index can learn from."""

TOKENS_AT_ONCE, STATES_AT_ONCE = 65536, 16
"""Layers of a short prompt are stored together, and sequences that are compressed as they grow: every launch of what
stores them takes as long as one of a layer's. At the most so many tokens of all layers, what is kept of their queries
counted too, and fitted states of one sequence or of several."""


def layers_at_once(shape: ModelShape, tokens: int, observed: int) -> int:
    """Layers whose ``tokens``, and queries of ``observed`` tokens, are stored together."""
    of_layer = 3 * tokens * shape.kv_dim + observed * shape.num_query_heads * shape.head_dim
    return max(1, min(STATES_AT_ONCE, shape.num_layers, 3 * TOKENS_AT_ONCE * shape.kv_dim // of_layer))


class SequenceNumbers(NamedTuple):
    """Of each of B sequences, int64 [B]: its slot, tokens cached, tokens sealed, pages of the ring, static pages."""

    slot: Any
    length: Any
    sealed: Any
    ring_pages: Any
    static_pages: Any


class SegmentNumbers(NamedTuple):
    """Of each of R segments, int64 [R]: its row of the page tables, its state, the sequence of the batch that it is of,
    the positions of its first token and after its last, and chunks to find and to draw per kv head."""

    row: Any
    state: Any
    sequence: Any
    first: Any
    end: Any
    found: Any
    drawn: Any


@dataclass(frozen=True)
class DecodePlan:
    """One more token for each of B sequences, as the host knows it: all that the device needs is in the numbers.

    Attributes:
        sequences, segments: NumPy arrays. Where no sequence has more than one segment there is one of each, R = B,
            empty where the sequence is dense.
        of_sequence: int64 [B, S], which segments a sequence has, R for none; None where there is one of each.
        exact_pages, sealed_pages: pages of the longest sequence and segment, at least 1 and 0; the widths of the page
            tables.
        max_budget: chunks that any segment may select, found and drawn.
        micro_batches: parts of the rows that go through the layers one behind the other, so that values of one are
            fetched while another computes.
        sealing: int64 [6, n], pages to be sealed before the step (``Sealing.seal_pages``); None where there are none.
    """

    sequences: SequenceNumbers
    segments: SegmentNumbers
    of_sequence: np.ndarray | None
    exact_pages: int
    sealed_pages: int
    max_budget: int
    micro_batches: int = 1
    sealing: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """What the shapes of all tensors of a step follow from."""
        most = 1 if self.of_sequence is None else self.of_sequence.shape[1]
        counts = len(self.sequences.slot), len(self.segments.row), most
        return (*counts, self.exact_pages, self.sealed_pages, self.max_budget, self.micro_batches)

    def packed(self) -> np.ndarray:
        """All numbers in one array, int64 [n]."""
        of_sequence = () if self.of_sequence is None else (self.of_sequence.ravel(),)
        return np.concatenate((*self.sequences, *self.segments, *of_sequence))

    def unpacked(self, numbers: Tensor) -> tuple[SequenceNumbers, SegmentNumbers, Tensor | None]:
        """The same of ``numbers`` int64 [n], packed by a plan of this shape, on any device."""
        count, rows, most = self.shape[:3]
        sequences, segments, rest = numbers.split((5 * count, 7 * rows, len(numbers) - 5 * count - 7 * rows))
        of_sequence = None if self.of_sequence is None else rest[: count * most].view(count, most)
        return SequenceNumbers(*sequences.view(5, -1)), SegmentNumbers(*segments.view(7, -1)), of_sequence


@dataclass(frozen=True)
class SealedBatch:
    """Sealed pages of R segments of a batch's sequences: of all of them, or of those that are compressed.

    Attributes:
        rows: int64 [R], their rows of the page tables, and of what else each has for itself.
        states: int64 [R], their fitted states.
        first: int64 [R], positions of their first tokens.
        pages: int64 [R, P], names of their sealed pages; anything past a segment's end.
        value_pages: int64 [R, P], names of the pages that hold ``values``.
        num_pages: int64 [R], sealed pages of each; ragged.
        num_chunks: int64 [R], their chunks.
        budget: int64 [R], chunks to find per kv head.
        max_budget: no row selects more, found and drawn.
        draws: chunks to draw besides, by the positions of the new tokens, so that every step has another draw; None
            where the policy draws none.
        overlapped: whether another micro-batch computes while values of these rows are fetched.
    """

    rows: Tensor
    states: Tensor
    first: Tensor
    pages: Tensor
    value_pages: Tensor
    num_pages: Tensor
    num_chunks: Tensor
    budget: Tensor
    max_budget: int
    draws: Draws | None = None
    overlapped: bool = False

    def part(self, rows: slice) -> SealedBatch:
        """Some of the rows, of values on the host: nothing is drawn from those."""
        assert self.draws is None
        names = ("rows", "states", "first", "pages", "value_pages", "num_pages", "num_chunks", "budget")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


@dataclass(frozen=True)
class DecodeBatch:
    """One new token for each of B sequences of any lengths, as the device sees it.

    Attributes:
        positions: int64 [B], position of each new token.
        pages: int64 [B, E], names of the exact pages.
        counts: int64 [B, E], valid tokens of each exact page, the new one included.
        write_page: int64 [B], name of the exact page that takes the new token.
        write_offset: int64 [B], its row there.
        sealed: None where no row has sealed pages.
        sequence: int64 [R], the rows of the batch that those of ``sealed`` are of; None where they are the same.
        of_sequence: int64 [B, S], which rows of ``sealed`` each of the batch has, R for none; None where it has one at
            the most.
    """

    positions: Tensor
    pages: Tensor
    counts: Tensor
    write_page: Tensor
    write_offset: Tensor
    sealed: SealedBatch | None
    sequence: Tensor | None = None
    of_sequence: Tensor | None = None

    def of_sealed(self, x: Tensor) -> Tensor:
        """[R, ...] of [B, ...], for the rows of ``sealed``."""
        return x if self.sequence is None else x[self.sequence]

    def split(self, count: int) -> list[DecodeBatch]:
        """``count`` micro-batches, of values on the host where it is more than one; at most as many as rows."""
        if count == 1:
            return [self]
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
            None if self.sealed is None else replace(self.sealed.part(rows), overlapped=True),
        )


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of one sequence in a packed prefill: rows ``start`` to ``stop`` of the batch."""

    sequence: Sequence
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
    """A segment of a cached sequence, as later tokens attend to it: a batch of one row, and its sink and outliers."""

    row: SealedBatch
    static: ExactRows


@dataclass(frozen=True)
class Places:
    """Where the new tokens of a sequence go, the same in every layer: on the device, so that no layer waits for a copy.

    Attributes:
        length: tokens of the sequence with them.
        before, sealed: tokens that are sealed already, and those that are now.
        segment: the last segment, which they are sealed in; None where nothing is sealed.
        fits: whether it is new: its state is to be fitted.
        state: int64 [1].
        observed: int64 [1], the state that learns from their last queries: that one, or the one that is held for when a
            dense sequence is compressed; None where there is none.
        first: position of the first token of the segment that it is of.
        pages, value_pages: int64 [sealed / 64], names of the pages that they go to.
        static: where the sink and the outliers of a new segment go.
        tail: where the exact tokens are that the sequence has already; those that are sealed now come from there first.
        exact: where the newest tokens go, or all that are new where none are sealed.
        cached: the segments that the sequence has already.
    """

    length: int
    before: int
    sealed: int
    segment: Segment | None
    fits: bool
    state: Tensor
    observed: Tensor | None
    first: int
    pages: Tensor
    value_pages: Tensor
    static: ExactRows
    tail: ExactRows
    exact: ExactRows
    cached: tuple[CachedSegment, ...]


class PrefillBatch:
    """New tokens of one or a few sequences, packed, and keys and values of them in the layers that are stored together.

    Attributes:
        new: tokens of each sequence, in order.
        positions: int64 [T].
        layers_at_once: g, how many are stored together.
        keys, rotated, values: [g, T, H, d], scratch of the layers at work, reused by the next.
        queries: the same of the last tokens of each segment, by its start: [g, w, H_q, d], rotated.
        storing: the layer at whose end new sequences are being stored, or were last, while it attends.
    """

    def __init__(self, new: list[NewTokens], device: torch.device, shape: ModelShape, dtype: torch.dtype) -> None:
        self.new = new
        self.num_tokens = new[-1].stop
        ranges = [torch.arange(s.cached, s.cached + s.stop - s.start) for s in new]
        self.positions = torch.cat(ranges).to(device)
        self.num_layers = shape.num_layers
        observed = sum(min(OBSERVED, s.stop - s.start) for s in new)
        self.layers_at_once = layers_at_once(shape, self.num_tokens, observed)
        self.keys, self.rotated, self.values = (
            torch.empty(
                self.layers_at_once, self.num_tokens, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device
            )
            for _ in range(3)
        )
        # Zeros: random keys may be stored without having been attended to.
        self.queries = {
            s.start: torch.zeros(
                self.layers_at_once,
                min(OBSERVED, s.stop - s.start),
                shape.num_query_heads,
                shape.head_dim,
                dtype=dtype,
                device=device,
            )
            for s in new
        }
        self.storing: int | None = None
        self._places: dict[int, Places] = {}

    def of(self, sequences: list[Sequence]) -> PrefillBatch:
        """The same new tokens as those of other sequences, empty ones of another cache; keys and values are shared."""
        other = copy(self)
        other.new = [replace(s, sequence=sequence) for s, sequence in zip(self.new, sequences, strict=True)]
        other._places = {}
        return other

    def places_of(self, segment: NewTokens, find: Callable[[Sequence, int], Places]) -> Places:
        """Where a segment's tokens go; found when first asked for."""
        if segment.start not in self._places:
            self._places[segment.start] = find(segment.sequence, segment.stop - segment.start)
        return self._places[segment.start]

    def stored_after(self, layer: int) -> slice | None:
        """The layers that are stored together once ``layer`` has been computed; None where others belong to them."""
        place = layer % self.layers_at_once
        if place + 1 < self.layers_at_once and layer + 1 < self.num_layers:
            return None
        return slice(layer - place, layer + 1)

    def place(self, layer: int) -> int:
        """Which of the layers in scratch ``layer`` is."""
        return layer % self.layers_at_once

    def keep_queries(self, layer: int, segment: NewTokens, q: Tensor, start: int) -> None:
        """Keeps those of a segment's rotated queries [n, H_q, d], of rows ``start`` on, that are among its last."""
        kept = self.queries[segment.start][self.place(layer)]
        first = segment.stop - len(kept)
        skipped = max(0, first - start)
        if skipped < len(q):
            kept[start + skipped - first : start + len(q) - first] = q[skipped:]

    def block(self, start: int, stop: int) -> PrefillBlock:
        """Tokens ``start`` to ``stop`` of the batch."""
        return PrefillBlock(self, start, stop)


@dataclass(frozen=True)
class PrefillBlock:
    """A run of a prefill's tokens: the unit between which it can be paused."""

    batch: PrefillBatch
    start: int
    stop: int
