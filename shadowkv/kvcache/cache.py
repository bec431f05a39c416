"""The KV cache: what models, engine and evaluations see of it.

ShadowKV, arXiv:2410.21465. Policies differ only in their parts. A cache is made of groups of layers that are alike
(``group.LayerGroup``): each has a policy and pages of its own, and a sequence is in all of them. Models call
``append`` and ``start`` with a ``batch.Batch``; an engine holds sequences (``allocate``, ``extend``, ``fork``,
``trim``, ``release``), makes batches of their next tokens (``plan_decode``, ``decode_batch``, ``end_decode``) and of
prompts (``prefill_batch``, ``finish_prefill``, ``end_prefill``), turns sequences into bytes
(``snapshots.open_reading``) and bytes into sequences (``snapshots.restore``). ``inspection.py`` shows what is
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.decode.attention import ExactLayers, QueryHook, SelectionHook
from shadowkv.kvcache.decode.batch import DecodePlan
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.decode.planning import padded, rounded
from shadowkv.kvcache.group import LayerGroup
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.prefill.batch import GroupPrefill, PrefillBatch
from shadowkv.kvcache.prefill.exact import exact_prompts, lengths_of, pages_of
from shadowkv.kvcache.prefill.sparse import BlockHook, SparsePrefill
from shadowkv.kvcache.sequences.group_layout import neighbours
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.pools import SequencePools
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.snapshots import Snapshots
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.registry import Ops


@dataclass(frozen=True)
class TierUse:
    """Bytes of one tier over all layers."""

    used_bytes: int
    total_bytes: int


class KVCache:
    """Keys and values of every sequence that an engine holds.

    Args:
        layout: the policy's layout on the model, for sequences of up to its ``max_model_len``.
        rope: the model's RoPE, of layers without their own; queries and keys are passed in before it.
        slots: sequences that can be held at once, running or finished.
        memory: blocks of the tiers of pages.
        ops: the engine's, chosen for this layout, RoPE and device (``case.choose_ops``).
        device: where attention is computed.
        weights: for each layer of the model, what it has for the policy's parts, by name; None where it has nothing.

    Attributes:
        groups: its groups of layers.
        sparse: attention over blocks of keys, where the policy's prefill is sparse.
        snapshots: turns sequences into bytes and bytes into sequences.
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
        sparse = self.spec.prefill == "sparse"
        self.sparse = SparsePrefill(self.ops, self.device, self.spec.prefill_error) if sparse else None
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
                self.sparse if group.spec.prefill == "sparse" else None,
                [weights[layer] for layer in group.layers],
            )
            for number, group in enumerate(layout.groups)
        ]
        self._places = [(self.groups[number], at) for number, at in layout.places]
        self.pools = SequencePools(layout, [group.pool for group in self.groups])
        self.snapshots = Snapshots(self.pools, rope, self.device)

    # -- sequences -------------------------------------------------------------------------------------------------

    @property
    def total(self) -> Blocks:
        """All that there is: blocks of each tier, slots of segments, and sequences."""
        return self.pools.total

    @property
    def free(self) -> Blocks:
        """Blocks that no sequence holds."""
        return self.pools.free

    @property
    def changes(self) -> int:
        """Grows whenever a sequence takes something, shares it or gives it back."""
        return self.pools.changes

    def demand(self, start: int, capacity: int) -> Blocks:
        """Blocks that a new sequence takes with a prompt of ``start`` tokens that may grow to ``capacity``."""
        return self.layout.demand(start, capacity)

    def growth(self, sequence: CachedSequence, start: int, capacity: int) -> Blocks:
        """Blocks that ``sequence`` lacks to be extended to ``start`` tokens by a prompt, then to ``capacity``."""
        return self.pools.growth(sequence, start, capacity)

    def held(self, sequences: Iterable[CachedSequence]) -> Blocks:
        """Blocks that would be free if ``sequences`` were released."""
        return self.pools.held(sequences)

    def allocate(self, start: int, capacity: int) -> CachedSequence:
        """A new, empty sequence that holds what ``demand`` says; raises OutOfBlocks, with nothing taken."""
        return self.pools.allocate(start, capacity)

    def extend(self, sequence: CachedSequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` what ``growth`` says; raises OutOfBlocks, with nothing taken."""
        self.pools.extend(sequence, start, capacity)

    def fork_point(self, sequence: CachedSequence, length: int) -> int:
        """The largest number of tokens up to ``length`` after which ``sequence`` can be forked."""
        return self.pools.fork_point(sequence, length)

    def fork(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> CachedSequence:
        """A new sequence that shares the first ``length`` tokens, a fork point, with ``sequence``: no bytes are copied.

        Raises OutOfBlocks, with nothing taken, and ValueError where it cannot be forked there.
        """
        return self.pools.fork(sequence, length, start, capacity)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forgets the newest tokens; compressed and shared ones cannot be forgotten (ValueError)."""
        self.pools.truncate(sequence, length)

    def trim(self, sequence: CachedSequence) -> None:
        """Gives back what a finished sequence holds for future tokens; it can be extended again."""
        self.pools.trim(sequence)

    def release(self, sequence: CachedSequence) -> None:
        """Gives back everything; the sequence must not be used again."""
        self.pools.release(sequence)

    def fork_demand(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> Blocks:
        """Blocks that ``fork`` takes; raises the same ValueErrors."""
        return self.pools.demand(self.pools.forked(sequence, length), start, capacity)

    def use(self) -> dict[str, TierUse]:
        """Bytes of each tier; may be called from any thread."""
        return {
            name: TierUse(sum(tier.used_bytes for tier in tiers), sum(tier.total_bytes for tier in tiers))
            for name, tiers in (
                (name, [group.store.tiers[name] for group in self.groups]) for name in self.groups[0].store.tiers
            )
        }

    @property
    def fetches(self) -> FetchCounts | None:
        """Chunks fetched from the host so far; None where there is no buffer. May be read from any thread."""
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
        """Packs new tokens of admitted sequences: pairs of a sequence and how many tokens it gains (at least 1).

        Args:
            bounds: layers that are not stored together with the one before.
            packed: the same tokens of another cache, whose scratch is used; the sequences are then empty.
        """
        groups: list[GroupPrefill] = []
        shared = None if packed is None else packed.groups[0]
        for group in self.groups:
            own = [(sequence.of_group(group.number), count) for sequence, count in sequences]
            groups.append(group.prefill.batch(own, bounds, groups[0] if groups else shared))
        return PrefillBatch(groups)

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores one layer's new tokens, in the policy's own form where the sequence is compressed."""
        group, at = self._places[layer]
        group.prefill.finish_layer(at, batch.groups[group.number])

    def leave_prefill(self) -> None:
        """To be called when a prefill ends or is given up: what it still stores is waited for before anything else."""
        for group in self.groups:
            group.prefill.join()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        for group, own in zip(self.groups, batch.groups, strict=True):
            group.prefill.end(own)

    # -- prompts that stay exact -----------------------------------------------------------------------------------

    @property
    def captures_prompts(self) -> bool:
        """Whether a graph can hold the attention of prompts that stay exact."""
        return all(group.exact.captured for group in self.groups)

    def stays_exact(self, sequence: CachedSequence, tokens: int) -> bool:
        """Whether a prompt's ``tokens`` tokens behind what its sequence has cached can be in ``exact_prompts``: the
        sequence is exact in every group and stays so, nothing is learned from its queries for later, and its attention
        can be captured."""
        if sequence.pending_layers is not None or not self.captures_prompts:
            return False
        for group in self.groups:
            own, layout, length = sequence.of_group(group.number), group.layout, sequence.length + tokens
            after = layout.growth.compressed(own.segment_state, length, length == own.capacity)
            learns = bool(own.state_reserve) and layout.parts.observing
            if own.path or after.tokens or after.fits or learns:
                return False
        return True

    def exact_numbers(self, sequences: Sequence[CachedSequence], lengths: Sequence[int], rows: int) -> np.ndarray:
        """What ``exact_prompts`` needs of sequences that gain these lengths, int64 [n]; of none for a capture."""
        of_groups = [pages_of(group.sequences(sequences), group.pool.tables) for group in self.groups]
        return np.stack((lengths_of(sequences, lengths, rows), *of_groups)).ravel()

    def exact_prompts(self, numbers: Tensor, rows: int) -> Batch:
        """Prompts of up to ``rows`` tokens that stay exact, from their numbers on the device."""
        lengths, *of_groups = numbers.view(1 + len(self.groups), 2, -1)
        parts = (
            (exact_prompts(lengths, pages, rows, group.pool.tables, group.layout.window),)
            for group, pages in zip(self.groups, of_groups, strict=True)
        )
        return Batch(tuple(parts))

    def end_exact_prompts(self, sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> None:
        """Makes prompts that stay exact part of their sequences, after the last layer."""
        for group in self.groups:
            for sequence, tokens in zip(group.sequences(sequences), lengths, strict=True):
                group.pool.tables.length[sequence.slot] += tokens

    # -- decode ----------------------------------------------------------------------------------------------------

    def plan_decode(self, sequences: Sequence[CachedSequence]) -> DecodePlan:
        """Plans one more token for each of ``sequences`` (at least one), and the compression that is due before.

        Raises ValueError if one of them is at its capacity.
        """
        plans = [group.planner.plan(group.sequences(sequences)) for group in self.groups]
        alone = all(plan.of_sequence is None for plan in plans)  # rows are cut where each has one segment
        parts = max(plan.micro_batches for plan in plans) if alone else 1
        return DecodePlan(tuple(replace(plan, micro_batches=parts) for plan in plans))

    def forecast_decode(
        self, sequences: Sequence[CachedSequence], joining: Sequence[tuple[CachedSequence, int]]
    ) -> DecodePlan | None:
        """Plans a step of padding rows, with the shapes of one that ``sequences`` will take together with those of
        ``joining``, whose prompts of that many tokens are being computed; None where these are not known."""
        plans = []
        for group in self.groups:
            joining_it = [(sequence.of_group(group.number), length) for sequence, length in joining]
            plan = group.planner.forecast(group.sequences(sequences), joining_it)
            if plan is None:
                return None
            plans.append(plan)
        return DecodePlan(tuple(plans))

    def decode_batch(self, plan: DecodePlan, numbers: Tensor | None = None) -> Batch:
        """``plan`` as the device sees it; ``numbers`` are the plan's, packed, where they are on the device already and
        what is due has been compressed (``compress_pages``): then only the plan's shapes are used, as a captured graph
        requires."""
        of_groups = [None] * len(self.groups) if numbers is None else plan.split(numbers)
        of_all = zip(self.groups, plan.groups, of_groups, strict=True)
        return Batch(tuple((group.decode.batch(own, part),) for group, own, part in of_all))

    def rounded(self, plan: DecodePlan, max_batch: int, batch: int | None = None) -> DecodePlan:
        """``plan`` with its shapes rounded up, so that few captured graphs serve many steps: its batch too, or to
        ``batch``."""
        of_all = zip(self.groups, plan.groups, strict=True)
        return DecodePlan(
            tuple(rounded(own, max_batch, group.layout.spec, group.pool.tables, batch) for group, own in of_all)
        )

    def padded_compression(self, number: int, numbers: np.ndarray) -> np.ndarray:
        """A group's ``GroupPlan.compression`` for a number of pages that is rounded up."""
        return padded(numbers, self.groups[number].compression.padding)

    def join_capture(self) -> None:
        """To be called where a capture fails halfway: it could not end before what runs on other streams is joined."""
        for group in self.groups:
            group.decode.side_stream.join_capture()

    def compress_pages(self, number: int, numbers: Tensor) -> None:
        """Compresses pages in all layers of a group: its ``GroupPlan.compression``, on the device."""
        self.groups[number].compression.compress_pages(numbers)

    def end_decode(self, plan: DecodePlan) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        for group, own in zip(self.groups, plan.groups, strict=True):
            group.planner.end(own)

    def exact_layers(self) -> ExactLayers | None:
        """Exact pages of all layers, for an op that appends and attends to them itself; None where layers are of
        several kinds, have a window, or values are fetched from the host."""
        group = self.groups[0]
        if len(self.groups) > 1 or group.layout.window is not None or group.decode.fetching is not None:
            return None
        return ExactLayers(group.store.k, group.store.v, group.store.rotary, group.decode.attend_beside)

    @property
    def selection_hook(self) -> SelectionHook | None:
        """Called with layer, RoPE-rotated queries [R, H_q, d], the batch and what the index selects in a decode step;
        what it returns is attended to. Not called where nothing is selected (``KVSpec.selects``). To be set before the
        first step: captured graphs keep the hook that they were captured with."""
        return self.groups[0].decode.hook

    @selection_hook.setter
    def selection_hook(self, hook: SelectionHook | None) -> None:
        for group in self.groups:
            group.decode.hook = hook

    @property
    def query_hook(self) -> QueryHook | None:
        """Called with layer, RoPE-rotated queries [B, H_q, d] and the batch of a decode step, before these attend to
        anything, also where nothing is selected. As for ``selection_hook``, captured graphs keep theirs."""
        return self.groups[0].decode.query_hook

    @query_hook.setter
    def query_hook(self, hook: QueryHook | None) -> None:
        for group in self.groups:
            group.decode.query_hook = hook

    @property
    def block_hook(self) -> BlockHook | None:
        """Called with layer, RoPE-rotated queries [n, H_q, d] and the blocks that a sparse prefill's tiles are to
        attend to (``select_blocks``); what it returns is attended to. There is none where prefill is dense."""
        return None if self.sparse is None else self.sparse.hook

    @block_hook.setter
    def block_hook(self, hook: BlockHook | None) -> None:
        if self.sparse is None:
            raise ValueError(f"prefill={self.spec.prefill!r} selects no blocks; use prefill='sparse'")
        self.sparse.hook = hook

    def take_attention_density(self) -> float | None:
        """Share of the blocks of keys that sparse prefills attended to since the last call; None where there were
        none. Waits for the device."""
        return None if self.sparse is None else self.sparse.take_density()

    def place(self, layer: int) -> tuple[LayerGroup, int]:
        """The group that a layer of the model is in, and which of the group's layers it is."""
        return self._places[layer]

    # -- what a model's attention calls ----------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Takes keys (before RoPE) and values [T, H, d] of the batch's new tokens."""
        group, at = self._places[layer]
        group.append(at, k, v, batch.groups[group.number])

    def start(self, layer: int, q: Tensor, batch: Batch, sinks: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts attention of the batch's new tokens, q [T, H_q, d] before RoPE, softmax scale 1 / sqrt(d), as far as
        it need not wait for values from the host; the returned function finishes it: [T, H_q, d], which may be anything
        for tokens of which it is not needed.

        In prefill over everything, or over chosen blocks where the policy's prefill is sparse; in decode over [sink |
        outliers | selected | tail], or over everything where dense. ``sinks``, float32 [H_q], are scores of one more
        position in every softmax, whose value is 0 (``ops/add_sinks``).
        """
        group, at = self._places[layer]
        return group.start(at, q, batch.groups[group.number], sinks)


class FanOut:
    """Several caches of one model that are prefilled together, with one sequence in each for every prompt.

    The first computes; the others, whose sequences are new, store the same keys and values in their own form.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches, self.device = list(caches), caches[0].device
        self._batches: list[PrefillBatch] = []

    def prefill_batch(self, sequences: list[tuple[tuple[CachedSequence, ...], int]]) -> PrefillBatch:
        """Packs new tokens: for each prompt its sequences, one of each cache, and how many tokens they gain."""
        of_caches = list(zip(*(of_prompt for of_prompt, _ in sequences), strict=True))
        works = [[(own, count) for own, (_, count) in zip(of_cache, sequences, strict=True)] for of_cache in of_caches]
        bounds = {
            group.layers[layers.start]  # layers that are alike in every cache are stored together
            for cache in self.caches
            for group in cache.layout.groups
            for layers in neighbours(group.layers)
        }
        first = self.caches[0].prefill_batch(works[0], bounds)
        others = zip(self.caches[1:], works[1:], strict=True)
        self._batches = [first, *(cache.prefill_batch(work, bounds, first) for cache, work in others)]
        return first

    def append(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Takes a block's keys and values."""
        self.caches[0].append(layer, k, v, batch)

    def start(self, layer: int, q: Tensor, batch: Batch, sinks: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts a block's attention."""
        return self.caches[0].start(layer, q, batch, sinks)

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores a layer in every cache."""
        for cache, own in zip(self.caches, self._batches, strict=True):
            cache.finish_prefill(layer, own)

    def leave_prefill(self) -> None:
        """To be called when a prefill ends or is given up."""
        for cache in self.caches:
            cache.leave_prefill()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences."""
        for cache, own in zip(self.caches, self._batches, strict=True):
            cache.end_prefill(own)
