"""``KVCache``: the KV cache (ShadowKV, arXiv:2410.21465), as models, engine and evaluations use it.

A cache has one or more groups of layers (``group.LayerGroup``). Each group has its own policy and pages, and a sequence
has pages in every group. Policies differ only in their parts. The model's attention calls ``append`` and ``start``
with a ``batch.Batch``. The engine calls the rest: it allocates sequences (``allocate``, ``extend``, ``fork``, ``trim``,
``release``), and makes batches of decode steps (``plan_decode``, ``decode_batch``, ``end_decode``) and of prompts
(``prefill_batch``, ``finish_prefill``, ``end_prefill``). The prefix cache turns sequences into bytes and back
(``snapshots.open_reading``, ``snapshots.restore``). ``inspection.py`` shows the stored keys and values.

Shapes: T tokens of a batch; B rows of a decode step; R segments; H kv heads, H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch, Part
from shadowkv.kvcache.decode.decode_attention import ExactLayers, QueryHook, SelectionHook
from shadowkv.kvcache.decode.decode_batch import DecodePlan
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.decode.planning import round_up, rounded
from shadowkv.kvcache.group import LayerGroup
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.parts import prefill_strategy
from shadowkv.kvcache.parts.base import BlockHook
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.exact import has_room, lengths_of, numbers_of, split_numbers
from shadowkv.kvcache.prefill.prefill_batch import GroupPrefill, PrefillBatch
from shadowkv.kvcache.recurrent.recurrent_part import RecurrentPart, RecurrentTokens, step
from shadowkv.kvcache.recurrent.states import RecurrentStates
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.pools import SequencePools
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.snapshots import Snapshots
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.registry import Ops


@dataclass(frozen=True)
class TierUse:
    """Bytes of one tier, summed over all layers."""

    used_bytes: int
    total_bytes: int


class KVCache:
    """Keys and values of every sequence that an engine holds.

    Args:
        layout: the policy's layout on the model, for sequences of up to its ``max_model_len``.
        rope: the RoPE of layers that have no RoPE of their own. Queries and keys arrive before RoPE.
        slots: number of sequences that the cache can hold, running or finished.
        memory: blocks of each tier.
        ops: the engine's ops, chosen for this layout, RoPE and device (``case.choose_ops``).
        device: device of the attention.
        weights: for each layer of the model, the weights that the policy's parts need, by name; None if no part needs
            any.

    Attributes:
        groups: the groups of layers with attention.
        recurrent: the states of layers with a recurrent state; None if there are none.
        strategy: the policy's prefill strategy.
        snapshots: turns sequences into bytes and back.
    """

    def __init__(
        self,
        layout: Layout,
        rope: RopeConfig,
        *,
        slots: int,
        memory: Blocks,
        ops: Ops,
        device: torch.device | str = "cpu",
        weights: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.layout, self.slots, self.device = layout, slots, torch.device(device)
        self.spec, self.shape, self.dtype, self.parts = layout.spec, layout.shape, layout.dtype, layout.parts
        self.max_model_len = layout.max_model_len
        self.ops = ops
        ropes = dict.fromkeys((rope, *(group.rope or rope for group in layout.groups)))
        rotary = {one: RotaryTables(one, self.max_model_len, self.device) for one in ropes}
        self.strategy = prefill_strategy(self.spec)(self.spec, self.device)
        weights = weights or [{}] * self.shape.num_layers
        self.groups = [
            LayerGroup(
                number,
                group,
                self.ops,
                rotary[group.rope or rope],
                slots,
                layout.of_group(number, memory),
                self.device,
                self.strategy,
                [weights[layer] for layer in group.layers],
            )
            for number, group in enumerate(layout.groups)
        ]
        of_groups = (self.groups[number] if number < len(self.groups) else None for number, _ in layout.places)
        self._places = [(group, at) for group, (_, at) in zip(of_groups, layout.places, strict=True)]
        recurrent = layout.recurrent
        self.recurrent = None if recurrent is None else RecurrentStates(recurrent, slots, self.device)
        self.pools = SequencePools(layout, [group.pool for group in self.groups], self.recurrent)
        self.snapshots = Snapshots(self.pools, rope, self.device)

    # -- sequences -------------------------------------------------------------------------------------------------

    @property
    def total(self) -> Blocks:
        """The cache's total capacity: blocks of each tier, segments, and sequences."""
        return self.pools.total

    @property
    def free(self) -> Blocks:
        """Blocks that no sequence holds."""
        return self.pools.free

    @property
    def changes(self) -> int:
        """A counter that grows whenever a sequence takes, shares or frees blocks, and whenever a checkpoint is added or
        dropped."""
        return self.pools.changes

    def demand(self, start: int, capacity: int) -> Blocks:
        """Blocks of a new sequence with a prompt of ``start`` tokens and a maximum length of ``capacity``."""
        return self.layout.demand(start, capacity)

    def growth(self, sequence: CachedSequence, start: int, capacity: int) -> Blocks:
        """Additional blocks that ``sequence`` needs to grow to ``start`` tokens by a prompt, then to ``capacity`` by
        decoding."""
        return self.pools.growth(sequence, start, capacity)

    def held(self, sequences: Iterable[CachedSequence]) -> Blocks:
        """Blocks that would be free if ``sequences`` were released."""
        return self.pools.held(sequences)

    def allocate(self, start: int, capacity: int, checkpoints: bool = True) -> CachedSequence:
        """Makes a new, empty sequence that holds the blocks of ``demand``. ``checkpoints`` says whether its prompts
        leave checkpoints of recurrent states, from which other sequences can begin. Raises OutOfBlocks and then takes
        nothing."""
        return self.pools.allocate(start, capacity, checkpoints)

    def extend(self, sequence: CachedSequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` the blocks of ``growth``. Raises OutOfBlocks and then takes nothing."""
        self.pools.extend(sequence, start, capacity)

    def fork_point(self, sequence: CachedSequence, length: int) -> int:
        """The largest number of tokens up to ``length`` after which ``sequence`` can be forked."""
        return self.pools.fork_point(sequence, length)

    def fork_points(self, sequence: CachedSequence, length: int) -> list[int]:
        """Returns the positions at which snapshots of the first ``length`` tokens of ``sequence`` should end, in
        ascending order. The last one is ``fork_point``. If layers have a recurrent state, the positions of earlier
        checkpoints come before it: the pages of a snapshot can be cut anywhere, but recurrent states exist only at
        checkpoints. Empty if there is no fork point."""
        return self.pools.fork_points(sequence, length)

    def fork(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> CachedSequence:
        """Makes a new sequence that shares its first ``length`` tokens with ``sequence``. Only windows and a recurrent
        state are copied. Raises OutOfBlocks and then takes nothing; ValueError if ``length`` is not a fork point."""
        return self.pools.fork(sequence, length, start, capacity)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Removes the tokens after ``length``. Raises ValueError if one of them is compressed or shared, or if layers
        have a recurrent state and the one after ``length`` tokens is not kept."""
        self.pools.truncate(sequence, length)

    def trim(self, sequence: CachedSequence) -> None:
        """Frees the blocks that a finished sequence holds for future tokens. The sequence can be extended again."""
        self.pools.trim(sequence)

    def release(self, sequence: CachedSequence) -> None:
        """Frees all blocks of a sequence. The sequence must not be used again."""
        self.pools.release(sequence)

    def fork_demand(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> Blocks:
        """Blocks that ``fork`` takes. Raises ValueError as ``fork`` does."""
        return self.pools.demand(self.pools.forked(sequence, length), start, capacity)

    def use(self) -> dict[str, TierUse]:
        """Bytes of each tier. Any thread can call it."""
        tiers = {name: [group.store.tiers[name] for group in self.groups] for name in self.groups[0].store.tiers}
        use = {
            name: TierUse(sum(tier.used_bytes for tier in same), sum(tier.total_bytes for tier in same))
            for name, same in tiers.items()
        }
        if self.recurrent is not None:
            use["recurrent_states"] = TierUse(self.recurrent.used_bytes, self.recurrent.total_bytes)
        return use

    @property
    def fetches(self) -> FetchCounts | None:
        """Counts of chunks fetched from the host so far; None without a fetch buffer. Any thread can read it."""
        counts = [group.decode.fetching.counts for group in self.groups if group.decode.fetching is not None]
        return FetchCounts(*map(sum, zip(*map(astuple, counts), strict=True))) if counts else None

    def forget_fetches(self) -> None:
        """Resets the counts of fetched chunks."""
        for group in self.groups:
            if group.decode.fetching is not None:
                group.decode.fetching.forget()

    # -- prefill ---------------------------------------------------------------------------------------------------

    def prefill_batch(
        self,
        sequences: list[tuple[CachedSequence, int]],
        bounds: Collection[int] = (),
        packed: PrefillBatch | None = None,
    ) -> PrefillBatch:
        """Packs the new tokens of prompts into a batch.

        Args:
            sequences: pairs of a sequence and the number of its new tokens, at least 1.
            bounds: layers that must not be stored together with the layer before them.
            packed: a batch of the same tokens for another cache. Both batches then share scratch memory, and the
                sequences must be empty.
        """
        groups: list[GroupPrefill] = []
        others = () if packed is None else packed.groups
        for group in self.groups:
            own = [(sequence.of_group(group.number), count) for sequence, count in sequences]
            shared = (other for other in (*groups, *others) if other.scratch == group.layout.scratch)
            groups.append(group.prefill.batch(own, bounds, next(shared, None)))
        return PrefillBatch(groups, self._recurrent_tokens(sequences))

    def _recurrent_tokens(self, sequences: list[tuple[CachedSequence, int]]) -> list[RecurrentTokens] | None:
        """Returns each sequence's new tokens for layers with a recurrent state, with the checkpoints to write among
        them. None if no layer has a recurrent state."""
        if self.recurrent is None:
            return None
        tokens, start = list[RecurrentTokens](), 0
        for sequence, count in sequences:
            cached, own = sequence.length, sequence.recurrent
            last = self._fork_point_after(sequence, cached + count)
            checkpoints = self.recurrent.plan_checkpoints(own, cached, last, between=not self.spec.outliers)
            wait = None if sequence.pending_layers is None else sequence.pending_layers.wait
            tokens.append(RecurrentTokens(own, start, start + count, cached, checkpoints, wait))
            start += count
        return tokens

    def _fork_point_after(self, sequence: CachedSequence, length: int) -> int:
        """Returns the largest fork point that a sequence will have after a prompt up to ``length`` tokens. Only pages
        are considered, not recurrent states."""
        point = (length - 1) // PAGE * PAGE
        for group in self.groups:
            own = sequence.of_group(group.number)
            after = group.layout.growth.compressed(own.segment_state, length, length == own.capacity)
            if after.tokens:
                point = min(point, after.tokens)
        return point

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores one layer's new tokens, compressed if the policy compresses the sequence."""
        group, at = self._places[layer]
        if group is not None:
            group.prefill.finish_layer(at, batch.groups[group.number])

    def leave_prefill(self) -> None:
        """Makes later work wait until no tokens are being stored any more. Must be called when a prefill ends or is
        abandoned."""
        for group in self.groups:
            group.prefill.join()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        for group, own in zip(self.groups, batch.groups, strict=True):
            group.prefill.end(own)
        for new in batch.new:
            if self.recurrent is not None:
                self.recurrent.end_prefill(new.sequence.recurrent, new.sequence.length)

    # -- prompts that a CUDA graph can capture -----------------------------------------------------------------------

    @property
    def captures_prompts(self) -> bool:
        """Whether a CUDA graph can capture the exact attention of prompts. It cannot if layers have recurrent states:
        each batch of prompts is split into spans in its own way."""
        return self.recurrent is None and all(group.exact.captured for group in self.groups)

    def can_capture(self, sequence: CachedSequence, tokens: int) -> bool:
        """Whether ``tokens`` new tokens of a prompt can be part of ``exact_prompts``.

        They can if all of these hold: their attention is exact, and a CUDA graph can capture it; no state is fitted on
        the tokens; if a part learns from their queries, there are at least ``OBSERVED`` tokens; all layers of the
        cached tokens have arrived; and a graph can handle the sequence's compressed pages
        (``LayerGroup.captures_compressing``).
        """
        length = sequence.length + tokens
        if sequence.pending_layers is not None or not self.captures_prompts or self.strategy.pays(tokens, length):
            return False
        return all(group.can_capture(sequence.of_group(group.number), tokens) for group in self.groups)

    @property
    def captures_compressing(self) -> bool:
        """Whether a CUDA graph can capture prompts of compressed sequences."""
        return self.captures_prompts and any(group.captures_compressing for group in self.groups)

    def compressing(self, sequences: Sequence[CachedSequence]) -> bool | None:
        """Returns whether a pass with prompts of ``sequences`` reads or writes compressed pages or learns from queries.
        Returns None if the sequences are too many for a pass, or have too many cached tokens or segments."""
        of_groups = [(group, group.sequences(sequences)) for group in self.groups]
        if not all(has_room(own) for _, own in of_groups):
            return None
        return any(sequence.path or group.learns(sequence) for group, own in of_groups for sequence in own)

    def exact_numbers(self, sequences: Sequence[CachedSequence], lengths: Sequence[int], rows: int) -> np.ndarray:
        """Returns the packed numbers int64 [n] that ``exact_prompts`` needs. ``lengths`` are the numbers of new tokens
        of the sequences. A capture passes no sequences."""
        of_groups = [
            numbers_of(group.sequences(sequences), lengths, group.layout, group.pool.tables) for group in self.groups
        ]
        return np.concatenate((lengths_of(sequences, lengths, rows).ravel(), *of_groups))

    def exact_prompts(self, numbers: Tensor, rows: int, compressing: bool) -> Batch:
        """Makes the batch of prompts from ``exact_numbers`` on the device, padded to ``rows`` tokens. ``compressing``
        is what the method of this name returns for the sequences."""
        lengths, of_groups = split_numbers(numbers, len(self.groups))
        parts = (
            (group.exact_prompts(lengths, own, rows, compressing),)
            for group, own in zip(self.groups, of_groups, strict=True)
        )
        return Batch(tuple(parts))

    def end_exact_prompts(self, sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> None:
        """Makes the new tokens of prompts in ``exact_prompts`` part of their sequences, after the last layer."""
        for group in self.groups:
            for sequence, tokens in zip(group.sequences(sequences), lengths, strict=True):
                group.end_exact_prompt(sequence, tokens)

    # -- decode ----------------------------------------------------------------------------------------------------

    def most_tokens(self, sequences: Sequence[CachedSequence]) -> list[int]:
        """Returns the maximum number of new tokens that a step can append to each sequence. It is limited by the
        sequence's capacity and by the next compression that is due."""
        if not self.layout.takes_drafts:
            return [1] * len(sequences)
        of_groups = [group.planner.most_tokens(group.sequences(sequences)) for group in self.groups]
        most: list[int] = np.minimum.reduce(of_groups).tolist()
        return most

    def plan_decode(
        self,
        sequences: Sequence[CachedSequence],
        counts: Sequence[int] | None = None,
        drafting: bool = False,
        compress: Callable[[int, np.ndarray, Callable[[Tensor], None]], None] | None = None,
    ) -> DecodePlan:
        """Plans a decode step of ``sequences`` (at least one). Pages that are due for compression before the step are
        compressed first.

        Args:
            counts: number of new tokens of each sequence, 1 to ``most_tokens``. Each new token is a row of the step;
                the rows of a sequence follow one another. None for one token each. Tokens that turn out to be wrong are
                removed with ``truncate``.
            drafting: whether the step is a draft step, in which the policy's index selects what is attended to
                (``KVSpec.drafts``).
            compress: compresses pages with a CUDA graph. It is called with the group's number, the padded numbers that
                describe the pages, and the function to capture, which takes these numbers on the device. None
                compresses eagerly.

        Raises ValueError if a sequence has no room for its new tokens.
        """
        plans = []
        for group in self.groups:
            own = compress and functools.partial(compress, group.number)
            plans.append(group.planner.plan(group.sequences(sequences), counts, drafting, own))
        alone = all(plan.of_sequence is None for plan in plans)  # micro-batches need one segment per row
        parts = max(plan.micro_batches for plan in plans) if alone else 1
        groups = tuple(replace(plan, micro_batches=parts) for plan in plans)
        recurrent = self.pools.step_states(sequences, counts)
        return DecodePlan(groups, recurrent, drafted=counts is not None and recurrent is not None)

    def forecast_decode(
        self, sequences: Sequence[CachedSequence], joining: Sequence[tuple[CachedSequence, int]]
    ) -> DecodePlan | None:
        """Plans a step of padding rows with the shapes of the next step of ``sequences`` and ``joining``; None if the
        shapes are not known yet.

        Args:
            joining: sequences whose prompts are being computed, with the prompts' lengths.
        """
        plans = []
        for group in self.groups:
            joining_it = [(sequence.of_group(group.number), length) for sequence, length in joining]
            plan = group.planner.forecast(group.sequences(sequences), joining_it)
            if plan is None:
                return None
            plans.append(plan)
        return DecodePlan(tuple(plans), self._padding_rows(len(sequences) + len(joining)))

    def forecast_rows(self, plan: DecodePlan, sequences: int, rows: int, drafting: bool = False) -> DecodePlan:
        """Returns ``plan``, of ``forecast_decode`` for one sequence, with the shapes of a step of more sequences and
        rows, as ``DecodePlanner.forecast_drafts`` does for a group of layers."""
        of_groups = zip(self.groups, plan.groups, strict=True)
        return DecodePlan(tuple(one.planner.forecast_drafts(own, sequences, rows, drafting) for one, own in of_groups))

    def decode_batch(self, plan: DecodePlan, numbers: Tensor | None = None) -> Batch:
        """Makes the batch of a planned step.

        Args:
            numbers: the plan's packed numbers on the device, for a captured graph. None uploads them.
        """
        of_groups = [None] * len(self.groups) if numbers is None else plan.split(numbers)
        parts = list[tuple[Part, ...]]()
        for group, own, part in zip(self.groups, plan.groups, of_groups):
            parts.append((group.decode.batch(own, part),))
        if plan.recurrent is not None:
            rows = upload(torch.from_numpy(plan.recurrent), self.device) if numbers is None else of_groups[-1]
            assert rows is not None
            read, write = rows.view(2, -1)
            parts.append((step(read, write, plan.drafted),))
        return Batch(tuple(parts))

    def rounded(self, plan: DecodePlan, max_batch: int, batch: int | None = None) -> DecodePlan:
        """Returns ``plan`` with its shapes rounded up, so that few captured graphs serve many steps, with drafts of
        different lengths or without.

        Args:
            max_batch: limit on the rounded number of rows; a plan with more rows keeps its number.
            batch: the number of rows; None rounds it up.
        """
        if batch is None:
            # Rows of a single sequence are rounded up to a power of 2, so that few graphs serve drafts of any length.
            alone = [own.most_rows for own in plan.groups if own.starts is not None and len(own.starts) == 2]
            batch = max(min(alone[0] if alone else round_up(plan.num_rows), max_batch), plan.num_rows)
        of_all = zip(self.groups, plan.groups, strict=True)
        groups = tuple(rounded(own, group.layout.spec, group.pool.tables, batch) for group, own in of_all)
        recurrent = self._padding_rows(len(groups[0].sequences.slot))
        if recurrent is not None and plan.recurrent is not None:
            recurrent[:, : plan.num_rows] = plan.recurrent
        return DecodePlan(groups, recurrent, drafted=bool(self.layout.most_drafted))

    def _padding_rows(self, count: int) -> np.ndarray | None:
        """Returns ``DecodePlan.recurrent`` for ``count`` padding rows; None if no layer has a recurrent state."""
        return None if self.recurrent is None else np.full((2, count), self.recurrent.padding)

    def join_capture(self) -> None:
        """Makes the current stream wait for the other streams of a failed graph capture. Only then can the capture
        end."""
        for group in self.groups:
            group.decode.side_stream.join_capture()

    def end_decode(self, plan: DecodePlan) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        for group, own in zip(self.groups, plan.groups, strict=True):
            group.planner.end(own)

    def exact_layers(self) -> ExactLayers | None:
        """Exact pages of all layers with attention, and states of the others, for an op that appends tokens, attends to
        exact pages and updates states itself. None if there are several groups of layers with attention, a window, an
        indexer, or values fetched from the host."""
        group = self.groups[0]
        several = len(self.groups) > 1 or self.shape.indexed
        if several or group.layout.window is not None or group.decode.fetching is not None:
            return None
        states = {} if self.recurrent is None else self.recurrent.arrays
        return ExactLayers(group.store.k, group.store.v, group.store.rotary, group.decode.attend_beside, states)

    @property
    def selection_hook(self) -> SelectionHook | None:
        """A function that decode steps call with the layer, RoPE-rotated queries [R, H_q, d], the batch and the index's
        selection. The step attends to the selection that the hook returns. The hook is not called in steps that attend
        to all tokens (``GroupPlan.selects``). Set it before the first step: captured graphs keep the hook of their
        capture."""
        return self.groups[0].decode.hook

    @selection_hook.setter
    def selection_hook(self, hook: SelectionHook | None) -> None:
        for group in self.groups:
            group.decode.hook = hook

    @property
    def query_hook(self) -> QueryHook | None:
        """A function that decode steps call before attention, also if the policy does not select. Arguments: the layer,
        RoPE-rotated queries [B, H_q, d] and the batch. Captured graphs keep the hook of their capture."""
        return self.groups[0].decode.query_hook

    @query_hook.setter
    def query_hook(self, hook: QueryHook | None) -> None:
        for group in self.groups:
            group.decode.query_hook = hook

    @property
    def block_hook(self) -> BlockHook | None:
        """A function that sparse prefills call with the selected blocks of every tile (``parts.base.BlockHook``). The
        tiles attend to the blocks that it returns. A dense prefill has no hook."""
        return self.strategy.hook

    @block_hook.setter
    def block_hook(self, hook: BlockHook | None) -> None:
        if not self.strategy.selects_blocks:
            raise ValueError(f"prefill={self.spec.prefill!r} selects no blocks; use prefill='sparse'")
        self.strategy.hook = hook

    def take_attention_density(self) -> float | None:
        """Returns the share of blocks of keys that sparse prefills attended to since the last call. None if there was
        no sparse prefill. Waits for the device."""
        return self.strategy.take_density()

    def place(self, layer: int) -> tuple[LayerGroup, int]:
        """Returns the group of a layer with attention, and the layer's number within the group. ``layer`` is its number
        in the model."""
        group, at = self._places[layer]
        assert group is not None, f"layer {layer} has no attention"
        return group, at

    # -- calls of the model's attention ----------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, batch: Batch, index_keys: Tensor | None = None) -> None:
        """Stores keys (before RoPE) and values [T, H, d] of the batch's new tokens, and in layers with an indexer their
        index keys (before RoPE) [T, 1, d]."""
        group, at = self.place(layer)
        group.append(at, k, v, batch.groups[group.number], index_keys)

    def start(
        self, layer: int, q: Tensor, batch: Batch, sinks: Tensor | None = None, index: IndexQueries | None = None
    ) -> Callable[[], Tensor]:
        """Starts attention of queries [T, H_q, d] before RoPE, with softmax scale 1 / sqrt(d).

        This call does all work that need not wait for values from the host. The returned function finishes the
        attention and returns [T, H_q, d]. Rows of tokens that do not need attention are undefined.

        Prefill attends to all earlier tokens, or to selected blocks if it is sparse. Decode attends to [sink | outliers
        | selected | tail], or to all tokens if the sequence is dense or the policy does not select. ``sinks``, float32
        [H_q], are scores of one more position in every softmax. The value of that position is 0 (``add_sinks``).

        In layers with an indexer, prefill and decode attend to what ``index`` selects (``policy.shape.Indexer``).
        """
        group, at = self.place(layer)
        return group.start(at, q, batch.groups[group.number], sinks, index)

    # -- calls of the model's recurrent layers ---------------------------------------------------------------------

    def states(self, layer: int, batch: Batch) -> tuple[dict[str, Tensor], tuple[RecurrentPart, ...]]:
        """Returns the recurrent states of a layer, by name [rows, *shape], and the parts of the batch that read and
        write these states."""
        assert self.recurrent is not None, f"layer {layer} has attention"
        _, at = self._places[layer]
        parts = cast("tuple[RecurrentPart, ...]", batch.groups[len(self.groups)])
        for part in parts:
            for wait in part.waits:
                wait(layer)
        return {name: array[at] for name, array in self.recurrent.arrays.items()}, parts
