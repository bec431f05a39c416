"""What a decode step tells the cache: which tokens of which sequences, as tensors over the whole batch; and how much is
stored at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.ops.sampling import Sampling

SEALED_AT_ONCE = 512
"""Pages of one layer that are coded at a time, to bound the temporary memory."""

OBSERVED = 64
"""Newest queries of a prompt that an index can learn from."""

TOKENS_AT_ONCE, STATES_AT_ONCE = 65536, 16
"""Layers of a short prompt are stored together, and so are sequences that are compressed as they grow: each launch that
stores them takes as long as one for a single layer. At most that many tokens of all layers are stored together, the
queries kept of them counted too, and that many fitted states, of one sequence or of several."""


def layers_at_once(shape: ModelShape, tokens: int, observed: int) -> int:
    """Layers whose ``tokens``, and queries of ``observed`` tokens, are stored together."""
    of_layer = 3 * tokens * shape.kv_dim + observed * shape.num_query_heads * shape.head_dim
    return max(1, min(STATES_AT_ONCE, shape.num_layers, 3 * TOKENS_AT_ONCE * shape.kv_dim // of_layer))


class SequenceNumbers(NamedTuple):
    """For each of B sequences, int64 [B]: its slot, tokens cached, tokens sealed, pages of the ring, static pages."""

    slot: Any
    length: Any
    sealed: Any
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
class DecodePlan:
    """One more token for each of B sequences, as the host knows it: all that the device needs is in the numbers.

    Attributes:
        sequences, segments: NumPy arrays. Where no sequence has more than one segment there is one of each, R = B,
            empty where the sequence is dense.
        of_sequence: int64 [B, S], which segments a sequence has, R for none; None where there is one of each.
        exact_pages, sealed_pages: pages of the longest sequence and segment, at least 1 and 0; the widths of the page
            tables.
        max_budget: chunks that any segment may select, top-k and sampled.
        micro_batches: parts of the rows that go through the layers one after the other, so that values of one are
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
        """Determines the shapes of all tensors of a step."""
        most = 1 if self.of_sequence is None else self.of_sequence.shape[1]
        counts = len(self.sequences.slot), len(self.segments.slot), most
        return (*counts, self.exact_pages, self.sealed_pages, self.max_budget, self.micro_batches)

    def packed(self) -> np.ndarray:
        """All numbers in one array, int64 [n]."""
        of_sequence = () if self.of_sequence is None else (self.of_sequence.ravel(),)
        return np.concatenate((*self.sequences, *self.segments, *of_sequence))

    def unpacked(self, numbers: Tensor) -> tuple[SequenceNumbers, SegmentNumbers, Tensor | None]:
        """Splits ``numbers`` int64 [n], packed by a plan of this shape, on any device."""
        count, rows, most = self.shape[:3]
        sequences, segments, rest = numbers.split((5 * count, 8 * rows, len(numbers) - 5 * count - 8 * rows))
        of_sequence = None if self.of_sequence is None else rest[: count * most].view(count, most)
        return SequenceNumbers(*sequences.view(5, -1)), SegmentNumbers(*segments.view(8, -1)), of_sequence


@dataclass(frozen=True)
class SealedBatch:
    """Sealed pages of R segments of a batch's sequences: of all of them, or of those that are compressed.

    Attributes:
        slots: int64 [R], their slots in the page tables and in whatever else each segment has of its own.
        states: int64 [R], their fitted states.
        first: int64 [R], positions of their first tokens.
        pages: int64 [R, P], names of their sealed pages; anything past a segment's end.
        value_pages: int64 [R, P], names of the pages that hold ``values``.
        num_pages: int64 [R], sealed pages of each; ragged.
        num_chunks: int64 [R], their chunks.
        budget: int64 [R], chunks to select by top-k per kv head.
        max_budget: no row selects more, top-k and sampled.
        sampling: chunks to sample in addition, by the seeds of requests and the positions of the new tokens: a
            different sample in every step; None where the policy samples none.
        overlapped: whether another micro-batch computes while values of these rows are fetched.
        span: for a policy without an index, the tokens of each row that are attended to, those after the sink: the
            first and the last + 1, int64 [R] each. None for other policies.
    """

    slots: Tensor
    states: Tensor
    first: Tensor
    pages: Tensor
    value_pages: Tensor
    num_pages: Tensor
    num_chunks: Tensor
    budget: Tensor
    max_budget: int
    sampling: Sampling | None = None
    overlapped: bool = False
    span: tuple[Tensor, Tensor] | None = None

    def part(self, rows: slice) -> SealedBatch:
        """Some of the rows, for values on the host that an index selects from: nothing is sampled from those."""
        assert self.sampling is None and self.span is None
        names = ("slots", "states", "first", "pages", "value_pages", "num_pages", "num_chunks", "budget")
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
        whole: for skipped layers, names of all pages of a sequence, sealed ones and those of its tail, int64 [B, S],
            and valid tokens of each, int64 [B, S]; None where no layer is skipped or no row has sealed pages.
        sequence: int64 [R], the row of the batch that each row of ``sealed`` belongs to; None where they are the same.
        of_sequence: int64 [B, S], which rows of ``sealed`` each row of the batch has, R for none; None where each has
            at most one.
    """

    positions: Tensor
    pages: Tensor
    counts: Tensor
    write_page: Tensor
    write_offset: Tensor
    sealed: SealedBatch | None
    sequence: Tensor | None = None
    of_sequence: Tensor | None = None
    whole: tuple[Tensor, Tensor] | None = None

    def of_sealed(self, x: Tensor) -> Tensor:
        """[R, ...] of [B, ...], for the rows of ``sealed``."""
        return x if self.sequence is None else x[self.sequence]

    def split(self, count: int) -> list[DecodeBatch]:
        """``count`` micro-batches, at most as many as rows; more than one only for values on the host."""
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
            whole=None if self.whole is None else (self.whole[0][rows], self.whole[1][rows]),
        )
