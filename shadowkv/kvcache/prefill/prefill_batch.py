"""Batches of prefills: new tokens of sequences, packed, and how and when they are stored.

Shapes: T tokens of a batch, S sequences, H kv heads, H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.compression.plans import StoragePlan, StoragePlanner
from shadowkv.kvcache.memory.streams import Numbers, upload
from shadowkv.kvcache.parts.base import OBSERVED, STATES_AT_ONCE, TOKENS_AT_ONCE
from shadowkv.kvcache.policy.shape import Heads, LayerKind, ModelShape
from shadowkv.kvcache.recurrent.recurrent_part import RecurrentPart, RecurrentTokens
from shadowkv.kvcache.recurrent.recurrent_part import block as recurrent_block
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import ExactRows


def layers_at_once(shape: ModelShape, tokens: int, observed: int) -> int:
    """Number of layers that are stored together, if each has ``tokens`` tokens and queries of ``observed`` tokens."""
    of_layer = 3 * tokens * shape.kv_dim + observed * shape.num_query_heads * shape.head_dim
    return max(1, min(STATES_AT_ONCE, shape.num_layers, 3 * TOKENS_AT_ONCE * shape.kv_dim // of_layer))


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of one sequence in a packed prefill: rows ``start`` to ``stop`` of the batch. The sequence has
    ``cached`` tokens before them."""

    sequence: CachedSequence
    start: int
    stop: int
    cached: int


@dataclass(frozen=True)
class LastQueries:
    """The last queries of n sequences of a batch, w queries of each. Parts learn from all of them together.

    Attributes:
        states: int64 [n], the states that learn.
        rows: int64 [n, w], rows of the batch's ``queries``.
        first: int64 [n], the number of the first query's token within its segment.
    """

    states: Tensor
    rows: Tensor
    first: Tensor


@dataclass(frozen=True)
class ToStore:
    """How the new tokens of some sequences are stored, in every layer.

    Attributes:
        observed: queries that parts learn from before the tokens are stored.
        exact: rows of the sequences that stay exact, and where they are written. Adjacent rows are joined.
        compressed: rows and plans of the other sequences.
    """

    observed: list[LastQueries]
    exact: list[tuple[slice, ExactRows]]
    compressed: list[tuple[slice, StoragePlan]]


class GroupPrefill:
    """New tokens of a few sequences in a group of layers, packed, with their keys and values in the layers that are
    stored together.

    Layers are numbered within the group. Groups with the same ``scratch`` share scratch memory, because all tokens of
    the layers that are stored together are stored before other layers are computed.

    Attributes:
        new: the new tokens of each sequence, in order.
        positions: int64 [T].
        starts: int32 [S + 1], the first row of each sequence.
        layers_at_once: g, the number of layers that are stored together.
        keys, rope_keys, values: [g, T, H, d], scratch memory of these layers, reused by the next ones.
        index_keys: [g, T, 1, d], scratch memory like ``keys``, after RoPE unless the indexer is pooled; None if no
            layer of the model has an indexer.
        queries: [g, Q, H_q, d], after RoPE: the last queries of each sequence, packed.
        last: int64 [Q], the rows of the batch that these queries belong to.
        layer_ranges: ranges of consecutive layers of the model. Only layers of one range are stored together.
        scratch: identifies the scratch memory. Groups with equal ``scratch`` share it (``GroupLayout.scratch``).
        storing: the last layer whose new sequences were stored during its attention; None if there was none.
        attended: the last layer that has attended with all blocks; None if there was none. If queries attend to keys of
            this layer again, they belong to a later layer that reuses the keys.
    """

    def __init__(
        self,
        new: list[NewTokens],
        planner: StoragePlanner,
        device: torch.device,
        shape: ModelShape,
        dtype: torch.dtype,
        layer_ranges: Sequence[range],
        scratch: tuple[Heads, LayerKind | None],
        indexed: bool = False,
    ) -> None:
        self.new, self.layer_ranges, self.scratch, self._planner = new, layer_ranges, scratch, planner
        self.num_tokens = new[-1].stop
        positions = np.concatenate([np.arange(s.cached, s.cached + s.stop - s.start) for s in new])
        self._last = np.concatenate([np.arange(max(s.start, s.stop - OBSERVED), s.stop) for s in new])
        starts = np.array([0, *(s.stop for s in new)])
        numbers = upload(torch.from_numpy(np.concatenate((positions, self._last, starts))), device)
        self.positions, self.last, starts_on_device = numbers.split([len(positions), len(self._last), len(starts)])
        self.starts = starts_on_device.int()
        observed = len(self._last)
        cached = sum(s.cached for s in new)  # a subspace may be fitted on their rebuilt keys and the new keys
        self.layers_at_once = layers_at_once(shape, self.num_tokens + cached, observed)
        self.keys, self.rope_keys, self.values = (
            torch.empty(
                self.layers_at_once, self.num_tokens, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device
            )
            for _ in range(3)
        )
        # Zeros, because benchmarks and tests store random keys without attention, so that no queries are written here.
        size = self.layers_at_once, observed, shape.num_query_heads, shape.head_dim
        self.queries = torch.zeros(size, dtype=dtype, device=device)
        self.index_keys = torch.empty_like(self.rope_keys[:, :, :1]) if indexed else None
        self.storing: int | None = None
        self.attended: int | None = None
        self._plans: dict[int, StoragePlan] = {}
        self._to_store: dict[bool, ToStore] = {}
        self._together: dict[tuple[RowRange, ...], list[tuple[RowRange, ...]]] = {}

    def of(
        self, sequences: list[CachedSequence], planner: StoragePlanner, layer_ranges: Sequence[range]
    ) -> GroupPrefill:
        """Returns a batch of the same new tokens for other ``sequences``: the sequences' parts in another group of
        layers, or empty sequences of another cache. Both batches share the memory of keys and values."""
        other = copy(self)
        other.layer_ranges, other.storing, other.attended = layer_ranges, None, None
        other.new = [replace(new, sequence=sequence) for new, sequence in zip(self.new, sequences, strict=True)]
        other._planner, other._plans, other._to_store, other._together = planner, {}, {}, {}
        return other

    @property
    def exact(self) -> tuple[Tensor, ...]:
        """The new tokens as exact pages store them: RoPE-rotated keys, values, and index keys if there are any."""
        others = () if self.index_keys is None else (self.index_keys,)
        return self.rope_keys, self.values, *others

    def plan_of(self, new: NewTokens) -> StoragePlan:
        """Returns how the new tokens of a sequence are stored. The first call plans all sequences."""
        if not self._plans:
            plans = self._planner.plan([(each.sequence, each.stop - each.start) for each in self.new])
            self._plans = {each.start: plan for each, plan in zip(self.new, plans, strict=True)}
        return self._plans[new.start]

    def to_store(self, cached: bool) -> ToStore:
        """Returns how the sequences with cached tokens (``cached``), or the new sequences, are stored. The first call
        computes it."""
        if cached not in self._to_store:
            planned = [(new, self.plan_of(new)) for new in self.new if bool(new.cached) == cached]
            compressed = [(slice(new.start, new.stop), plan) for new, plan in planned if plan.compressed]
            self._to_store[cached] = ToStore(self._observed(planned), list(_exact(planned)), compressed)
        return self._to_store[cached]

    def _observed(self, planned: Sequence[tuple[NewTokens, StoragePlan]]) -> list[LastQueries]:
        """Returns the last queries of all sequences with a state that learns from them, grouped by the number of
        queries."""
        alike: dict[int, list[tuple[Tensor, np.ndarray, int]]] = {}
        for new, plan in planned:
            if plan.observed is not None:
                rows = self._last_of(new)
                first = plan.length - len(rows) - plan.before
                alike.setdefault(len(rows), []).append((plan.observed, rows, first))
        groups = []
        for count, same in alike.items():
            states, rows_of_each, first_of_each = zip(*same, strict=True)
            numbers = Numbers()
            numbers.add(np.stack((*rows_of_each,)))
            numbers.add(first_of_each)
            kept, positions = numbers.on(self.positions.device).split([count * len(same), len(same)])
            groups.append(LastQueries(torch.cat(states), kept.view(-1, count), positions))
        return groups

    def attending_together(
        self, block: PrefillBlock, shared: Callable[[GroupPrefill, RowRange], tuple[object, ...] | None]
    ) -> list[tuple[RowRange, ...]]:
        """Returns the row ranges of a block, in groups of neighbours for which ``shared`` returns equal identifiers.
        The first call computes the groups."""
        if block.row_ranges not in self._together:
            groups: list[tuple[RowRange, ...]] = []
            last: tuple[object, ...] | None = None
            for row_range in block.row_ranges:
                this = shared(self, row_range)
                if this is not None and this == last and (block.ends_only or groups[-1][-1].stop == row_range.start):
                    groups[-1] += (row_range,)
                else:
                    groups.append((row_range,))
                last = this
            self._together[block.row_ranges] = groups
        return self._together[block.row_ranges]

    def stored_after(self, layer: int) -> slice | None:
        """The layers that are stored together after ``layer``; None if ``layer`` is not the last of them."""
        index = self.scratch_index(layer)
        if index + 1 < self.layers_at_once and layer + 1 != self._layer_range(layer).stop:
            return None
        return slice(layer - index, layer + 1)

    def scratch_index(self, layer: int) -> int:
        """The place of ``layer`` in scratch memory."""
        return (layer - self._layer_range(layer).start) % self.layers_at_once

    def _layer_range(self, layer: int) -> range:
        return next(layers for layers in self.layer_ranges if layer in layers)

    def _last_of(self, new: NewTokens) -> np.ndarray:
        """Returns the rows of ``queries`` that belong to a sequence."""
        return np.arange(*np.searchsorted(self._last, (new.start, new.stop)))

    def keep_queries(self, layer: int, block: PrefillBlock, q: Tensor) -> None:
        """Keeps the RoPE-rotated queries of a block, ``q`` [n, H_q, d], that are among the last ``OBSERVED`` of their
        sequences."""
        if len(block.last):
            self.queries[self.scratch_index(layer), block.kept] = q[block.last]

    def block(self, start: int, stop: int) -> PrefillBlock:
        """Tokens ``start`` to ``stop`` of the batch."""
        kept = slice(*np.searchsorted(self._last, (start, stop)).tolist())
        positions, row_ranges = self.positions[start:stop], tuple(self._row_ranges(start, stop))
        return PrefillBlock(self, start, stop, positions, row_ranges, kept, self.last[kept] - start)

    def _row_ranges(self, start: int, stop: int) -> Iterator[RowRange]:
        def packed(numbered: tuple[int, NewTokens]) -> bool:
            new = numbered[1]
            return not new.cached and start <= new.start and new.stop <= stop

        here = [(i, new) for i, new in enumerate(self.new) if new.start < stop and start < new.stop]
        for together, group in groupby(here, packed):
            numbers, tokens = zip(*group, strict=True)
            if together and len(tokens) > 1:
                starts = self.starts[numbers[0] : numbers[-1] + 2] - tokens[0].start
                lengths = tuple(new.stop - new.start for new in tokens)
                yield RowRange(tokens[0].start, tokens[-1].stop, None, starts, lengths)
                continue
            for new in tokens:
                yield RowRange(max(start, new.start), min(stop, new.stop), new)


@dataclass(frozen=True, eq=False)
class RowRange:
    """Neighbouring tokens of a block that attend in one call: rows ``start`` to ``stop`` of the batch. They are tokens
    of one sequence, or all tokens of several new sequences.

    Attributes:
        alone: the tokens of the one sequence; None for several.
        cu_seqlens: int32 [S + 1], the first row of each of several sequences, within the range.
        lengths: the number of tokens of each of several sequences.
    """

    start: int
    stop: int
    alone: NewTokens | None
    cu_seqlens: Tensor | None = None
    lengths: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences."""
        return len(self.lengths) or 1


@dataclass(frozen=True)
class PrefillBlock:
    """Neighbouring tokens of a prefill. The prefill can pause between two blocks.

    Attributes:
        positions: int64 [n].
        row_ranges: the block's tokens whose attention is needed. Tokens of one range attend in one call.
        kept: rows of the batch's ``queries`` that belong to the block's tokens.
        last: int64, for each of these rows, the number of its token within the block.
        ends_only: whether the block has only the last token of each sequence in ``row_ranges``.
    """

    batch: GroupPrefill
    start: int
    stop: int
    positions: Tensor
    row_ranges: tuple[RowRange, ...]
    kept: slice
    last: Tensor
    ends_only: bool = False

    @property
    def num_tokens(self) -> int:
        """n, the number of tokens of the block."""
        return len(self.positions)

    def of_ends(self, tail: int) -> PrefillBlock:
        """Returns the same block with attention only for the tokens of ``ends``."""
        return replace(self, row_ranges=tuple(self.ends(tail)))

    def only_ends(self, positions: Tensor) -> PrefillBlock:
        """Returns a block of only the tokens of ``ends(1)``, which are at ``positions`` int64 [n]. The block cannot be
        used to store tokens. Packed sequences still attend in one call."""
        ending = {cast(NewTokens, end.alone).start for end in self.ends(1)}
        row_ranges = (
            one if one.alone is None else RowRange(one.stop - 1, one.stop, one.alone)
            for one in self.row_ranges
            if one.alone is None or one.alone.start in ending
        )
        return replace(self, positions=positions, row_ranges=tuple(row_ranges), ends_only=True)

    def rows_of(self, groups: Sequence[tuple[RowRange, ...]]) -> Iterator[slice]:
        """Yields, for each group of row ranges in order, the rows of the group's tokens within the block."""
        if not self.ends_only:
            yield from (slice(group[0].start - self.start, group[-1].stop - self.start) for group in groups)
            return
        start = 0
        for group in groups:
            stop = start + sum(row_range.num_sequences for row_range in group)
            yield slice(start, stop)
            start = stop

    def ends(self, tail: int) -> list[RowRange]:
        """The last ``tail`` tokens of each sequence, as far as they are in the block. If parts learn from queries of a
        sequence that continues after the block, at least the block's last token is included."""
        ends = list[RowRange]()
        for new in self.batch.new:
            stop = min(new.stop, self.stop)
            if self.start < new.stop and max(new.start, new.stop - max(tail, OBSERVED)) < self.stop:
                ends.append(RowRange(max(self.start, new.start, min(new.stop - tail, stop - 1)), stop, new))
        return ends


class PrefillBatch:
    """New tokens of a few sequences, packed, in all groups of layers. ``KVCache.prefill_batch`` makes it.

    Args:
        recurrent: each sequence's tokens for layers with a recurrent state; None if there are none.

    Attributes:
        groups: the batch of each group of layers.
        new: the new tokens of each sequence, in order, in the first group.
        num_tokens: T.
        starts: int32 [S + 1], the first row of each sequence.
    """

    def __init__(self, groups: Sequence[GroupPrefill], recurrent: Sequence[RecurrentTokens] | None = None) -> None:
        self.groups, self._recurrent = tuple(groups), recurrent
        self.new, self.num_tokens, self.starts = groups[0].new, groups[0].num_tokens, groups[0].starts

    def block(self, start: int, stop: int) -> Batch:
        """Tokens ``start`` to ``stop``."""
        return Batch((*((group.block(start, stop),) for group in self.groups), *self._of_recurrent(start, stop)))

    def ends(self, start: int, stop: int, tail: int = 1) -> Batch:
        """Returns the batch of tokens ``start`` to ``stop``, with attention only for the last ``tail`` new tokens of
        each sequence. If parts learn from queries of a sequence that continues after the block, the block's last token
        needs attention too."""
        blocks = [group.block(start, stop) for group in self.groups]
        needed = _rows(blocks[0].ends(tail)) - start
        rows = upload(torch.from_numpy(needed), self.starts.device)
        return Batch((*((block.of_ends(tail),) for block in blocks), *self._of_recurrent(start, stop)), rows)

    def only_ends(self, start: int, stop: int) -> Batch:
        """Returns a batch of only the tokens that ``ends`` needs, for layers that attend to keys of other layers and
        store nothing."""
        blocks, needed = [group.block(start, stop) for group in self.groups], self.ends(start, stop).needed
        assert needed is not None and self._recurrent is None, "a recurrent state needs all tokens"
        positions = self.groups[0].positions[start:stop][needed]
        return Batch(tuple((block.only_ends(positions),) for block in blocks))

    def _of_recurrent(self, start: int, stop: int) -> tuple[tuple[RecurrentPart], ...]:
        """The part for layers with a recurrent state; empty if there are none."""
        if self._recurrent is None:
            return ()
        return ((recurrent_block(self._recurrent, start, stop, self.starts.device),),)

    def tails(self, tail: int, blocks: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Returns the rows of the last ``tail`` new tokens of each sequence, int64 [n]: rows of the batch, or, with
        ``blocks``, rows among all tokens that ``ends`` of these blocks needs, joined in order."""
        if blocks is None:
            rows = _rows([RowRange(max(new.start, new.stop - tail), new.stop, new) for new in self.new])
        else:
            ends = [end for start, stop in blocks for end in self.groups[0].block(start, stop).ends(tail)]
            first = np.repeat([cast(NewTokens, end.alone).stop - tail for end in ends], [len(end) for end in ends])
            rows = (_rows(ends) >= first).nonzero()[0]
        return upload(torch.from_numpy(rows), self.starts.device)  # the host does not wait for the last layer

    def last_of_tails(self, tail: int) -> Tensor:
        """Returns, for each sequence, the row of its last token in ``tails``, int64 [S]."""
        counts = [min(tail, new.stop - new.start) for new in self.new]
        return upload(torch.from_numpy(np.cumsum(counts) - 1), self.starts.device)


def _rows(ranges: Sequence[RowRange]) -> np.ndarray:
    """The rows of row ranges, int64 [n]."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(one.start, one.stop) for one in ranges)])


def _exact(planned: Sequence[tuple[NewTokens, StoragePlan]]) -> Iterator[tuple[slice, ExactRows]]:
    """Yields the rows of sequences that stay exact, and where they are written. Adjacent rows are joined."""
    start, stop, together = 0, 0, list[ExactRows]()

    def joined() -> tuple[slice, ExactRows]:
        pages, offsets = (torch.cat([getattr(rows, name) for rows in together]) for name in ("pages", "offsets"))
        return slice(start, stop), ExactRows(pages, offsets)

    for new, plan in planned:
        first = new.stop - len(plan.exact.pages)  # a window does not keep earlier tokens
        if together and (plan.compressed or first != stop):
            yield joined()
            together = []
        if not plan.compressed:
            start, stop = start if together else first, new.stop
            together.append(plan.exact)
    if together:
        yield joined()
