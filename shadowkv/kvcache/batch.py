"""What one forward pass tells the cache: which tokens of which sequences, as tensors over the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.sequence import Sequence
from shadowkv.kvcache.shape import ModelShape
from shadowkv.ops.select_by_sketch.draws import Draws

OBSERVED = 64
"""Newest queries of a prompt that an index can learn from."""


@dataclass(frozen=True)
class DecodePlan:
    """One more token for each of B sequences, as the host knows it: all that the device needs is in ``numbers``.

    Attributes:
        slots: int64 [B].
        numbers: int64 [8, B]: slots, tokens cached, tokens sealed, pages of the ring, static pages, static tokens,
            chunks to find and chunks to draw per kv head.
        exact_pages, sealed_pages: pages of the longest row, at least 1 and 0; the widths of the page tables.
        max_budget: chunks that any row may select, found and drawn.
        micro_batches: parts of the rows that go through the layers one behind the other, so that values of one are
            fetched while another computes.
    """

    slots: np.ndarray
    numbers: np.ndarray
    exact_pages: int
    sealed_pages: int
    max_budget: int
    micro_batches: int = 1


@dataclass(frozen=True)
class SealedBatch:
    """Sealed pages of B rows of a batch: all of them, or those that are compressed. Rows that are dense have none.

    Attributes:
        slots: int64 [B].
        pages: int64 [B, P], granules of their sealed pages; anything past a row's end.
        value_pages: int64 [B, P], granules of the pages that hold ``values``.
        num_pages: int64 [B], sealed pages of each row; ragged.
        num_chunks: int64 [B], their chunks.
        budget: int64 [B], chunks to find per kv head.
        max_budget: no row selects more, found and drawn.
        draws: chunks to draw besides, by the positions of the new tokens, so that every step has another draw; None
            where the policy draws none.
        overlapped: whether another micro-batch computes while values of these rows are fetched.
    """

    slots: Tensor
    pages: Tensor
    value_pages: Tensor
    num_pages: Tensor
    num_chunks: Tensor
    budget: Tensor
    max_budget: int
    draws: Draws | None = None
    overlapped: bool = False

    def rows(self, rows: slice) -> SealedBatch:
        """Some of the rows, of values on the host: nothing is drawn from those."""
        assert self.draws is None
        return replace(
            self,
            slots=self.slots[rows],
            pages=self.pages[rows],
            value_pages=self.value_pages[rows],
            num_pages=self.num_pages[rows],
            num_chunks=self.num_chunks[rows],
            budget=self.budget[rows],
        )


@dataclass(frozen=True)
class DecodeBatch:
    """One new token for each of B sequences of any lengths, as the device sees it.

    Attributes:
        positions: int64 [B], position of each new token.
        pages: int64 [B, E], granules of the exact pages.
        counts: int64 [B, E], valid tokens of each exact page, the new one included.
        write_page: int64 [B], granule of the exact page that takes the new token.
        write_offset: int64 [B], its row there.
        sealed: None where no row has sealed pages.
        compressed: int64 [R], the rows that ``sealed`` is of, ascending; None where it is of all.
    """

    positions: Tensor
    pages: Tensor
    counts: Tensor
    write_page: Tensor
    write_offset: Tensor
    sealed: SealedBatch | None
    compressed: Tensor | None = None

    def of_sealed(self, x: Tensor) -> Tensor:
        """Those of [B, ...] that belong to the rows of ``sealed``."""
        return x if self.compressed is None else x[self.compressed]

    def with_sealed(self, x: Tensor, found: Tensor) -> Tensor:
        """[B, ...] with those of the rows of ``sealed`` replaced by ``found`` [R, ...]."""
        return found if self.compressed is None else x.index_copy(0, self.compressed, found)

    def split(self, count: int) -> list[DecodeBatch]:
        """``count`` micro-batches, of values on the host where it is more than one; at most as many as rows."""
        if count == 1:
            return [self]
        bounds = [part * len(self.positions) // count for part in range(count + 1)]
        return [self._rows(slice(start, stop)) for start, stop in pairwise(bounds)]

    def _rows(self, rows: slice) -> DecodeBatch:
        assert self.compressed is None  # no rows are left out where there are micro-batches
        return DecodeBatch(
            self.positions[rows],
            self.pages[rows],
            self.counts[rows],
            self.write_page[rows],
            self.write_offset[rows],
            None if self.sealed is None else replace(self.sealed.rows(rows), overlapped=True),
        )


@dataclass(frozen=True)
class Segment:
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
class Places:
    """Where the new tokens of a sequence go, the same in every layer: on the device, so that no layer waits for a copy.

    Attributes:
        compressed: whether the sequence is, with its new tokens.
        before, sealed: tokens that are sealed already, and those that are now.
        slot: int64 [1].
        pages, value_pages: int64 [sealed / 64], granules of the pages that they go to.
        static: where the sink and the outliers go if there are no sealed tokens yet.
        tail: where the exact tokens are that the sequence has already; those that are sealed now come from there first.
        exact: where the newest tokens go, or all that are new where the sequence stays dense.
        cached: the sealed pages that the sequence has already; None where it has none.
    """

    compressed: bool
    before: int
    sealed: int
    slot: Tensor
    pages: Tensor
    value_pages: Tensor
    static: ExactRows
    tail: ExactRows
    exact: ExactRows
    cached: SealedBatch | None


class PrefillBatch:
    """New tokens of one or a few sequences, packed, and one layer's keys and values of them.

    Attributes:
        segments: one per sequence, in order.
        positions: int64 [T].
        keys, rotated, values: [T, H, d], scratch of the layer at work, reused by the next.
        queries: the same of the last tokens of each segment, by its start: [w, H_q, d], rotated.
        storing: the layer whose new sequences are being stored, or were last, while it attends.
    """

    def __init__(self, segments: list[Segment], device: torch.device, shape: ModelShape, dtype: torch.dtype) -> None:
        self.segments = segments
        self.num_tokens = segments[-1].stop
        ranges = [torch.arange(s.cached, s.cached + s.stop - s.start) for s in segments]
        self.positions = torch.cat(ranges).to(device)
        self.keys, self.rotated, self.values = (
            torch.empty(self.num_tokens, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
            for _ in range(3)
        )
        # Zeros: random keys may be stored without having been attended to.
        self.queries = {
            s.start: torch.zeros(
                min(OBSERVED, s.stop - s.start), shape.num_query_heads, shape.head_dim, dtype=dtype, device=device
            )
            for s in segments
        }
        self.storing: int | None = None
        self._places: dict[int, Places] = {}

    def of(self, sequences: list[Sequence]) -> PrefillBatch:
        """The same new tokens as those of other sequences, empty ones of another cache; keys and values are shared."""
        other = copy(self)
        other.segments = [replace(s, sequence=sequence) for s, sequence in zip(self.segments, sequences, strict=True)]
        other._places = {}
        return other

    def places_of(self, segment: Segment, find: Callable[[Sequence, int], Places]) -> Places:
        """Where a segment's tokens go; found when first asked for."""
        if segment.start not in self._places:
            self._places[segment.start] = find(segment.sequence, segment.stop - segment.start)
        return self._places[segment.start]

    def keep_queries(self, segment: Segment, q: Tensor, start: int) -> None:
        """Keeps those of a segment's rotated queries [n, H_q, d], of rows ``start`` on, that are among its last."""
        kept = self.queries[segment.start]
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
