"""The KV cache: what models, engine and evaluations see of it.

ShadowKV, arXiv:2410.21465. Policies differ only in their parts. Models call ``append``, ``begin`` or ``attend``, and
``finish_prefill``; an engine holds sequences (``allocate``, ``extend``, ``fork``, ``trim``, ``release``) and runs steps
(``plan_decode``, ``decode_batch``, ``end_decode``), turns sequences into bytes (``open_reading``) and bytes into
sequences (``restore``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.case import case_of
from shadowkv.kvcache.decode.attention import Decode, SelectionHook
from shadowkv.kvcache.decode.batch import DecodeBatch, DecodePlan, SealedBatch
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.decode.planning import padded, rounded
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.attention import Prefill
from shadowkv.kvcache.prefill.batch import PrefillBatch, PrefillBlock
from shadowkv.kvcache.prefill.sparse import BlockHook
from shadowkv.kvcache.sealing.pages import Sealing
from shadowkv.kvcache.selected_scores import selected_scores
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.outline import Link
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import Store
from shadowkv.kvcache.snapshots.header import Snapshot, SnapshotHeader
from shadowkv.kvcache.snapshots.reading import Reading
from shadowkv.kvcache.snapshots.restoring import Restoring
from shadowkv.kvcache.snapshots.snapshots import Transfer
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
        rope: the model's RoPE; queries and keys are passed in before it.
        slots: sequences that can be held at once, running or finished.
        memory: blocks of the tiers of pages.
        device: where attention is computed.
        backends: backends of ops, by name, where they are not to be chosen from the arguments above.
    """

    def __init__(
        self,
        layout: Layout,
        rope: RopeConfig,
        *,
        slots: int,
        memory: Blocks,
        device: torch.device | str = "cpu",
        backends: Mapping[str, str] | None = None,
    ) -> None:
        self.layout, self.slots, self.device = layout, slots, torch.device(device)
        self.spec, self.shape, self.dtype, self.parts = layout.spec, layout.shape, layout.dtype, layout.parts
        self.max_model_len = layout.max_model_len
        self.ops = Ops(self.device, case_of(layout, rope, self.device), backends)
        rotary = RotaryTables(rope, self.max_model_len, self.device)
        self.store = Store(layout, self.ops, rotary, slots, memory, self.device)
        self.pool = SequencePool(self.store, slots, self.max_model_len)
        self.sealing = Sealing(self.store, self.parts, self.pool.tables)
        self.prefill = Prefill(self.store, self.parts, self.pool, self.sealing)
        self.decode = Decode(self.store, self.parts, self.pool, self.sealing, self.prefill)
        self.transfer = Transfer(self.store, self.pool)

    # -- sequences -------------------------------------------------------------------------------------------------

    @property
    def total(self) -> Blocks:
        """All that there is: blocks of each tier, slots of segments, and sequences."""
        return self.pool.total

    @property
    def free(self) -> Blocks:
        """Blocks that no sequence holds."""
        return self.pool.free

    @property
    def changes(self) -> int:
        """Grows whenever a sequence takes something, shares it or gives it back."""
        return sum(pool.changes for pool in self.pool.pools.values())

    def demand(self, start: int, capacity: int) -> Blocks:
        """Blocks that a new sequence takes with a prompt of ``start`` tokens that may grow to ``capacity``."""
        return self.layout.demand(start, capacity)

    def growth(self, sequence: CachedSequence, start: int, capacity: int) -> Blocks:
        """Blocks that ``sequence`` lacks to be extended to ``start`` tokens by a prompt, then to ``capacity``."""
        return self.pool.growth(sequence, start, capacity)

    def held(self, sequences: Iterable[CachedSequence]) -> Blocks:
        """Blocks that would be free if ``sequences`` were released."""
        return self.pool.held(sequences)

    def allocate(self, start: int, capacity: int) -> CachedSequence:
        """A new, empty sequence that holds what ``demand`` says; raises OutOfBlocks, with nothing taken."""
        return self.pool.allocate(start, capacity)

    def extend(self, sequence: CachedSequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` what ``growth`` says; raises OutOfBlocks, with nothing taken."""
        self.pool.extend(sequence, start, capacity)

    def fork_point(self, sequence: CachedSequence, length: int) -> int:
        """The largest number of tokens up to ``length`` after which ``sequence`` can be forked."""
        return self.pool.fork_point(sequence, length)

    def fork(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> CachedSequence:
        """A new sequence that shares the first ``length`` tokens, a fork point, with ``sequence``: no bytes are copied.

        Raises OutOfBlocks, with nothing taken, and ValueError where it cannot be forked there.
        """
        return self.pool.fork(sequence, length, start, capacity)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forgets the newest tokens; sealed and shared ones cannot be forgotten (ValueError)."""
        self.pool.truncate(sequence, length)

    def trim(self, sequence: CachedSequence) -> None:
        """Gives back what a finished sequence holds for future tokens; it can be extended again."""
        self.pool.trim(sequence)

    def release(self, sequence: CachedSequence) -> None:
        """Gives back everything; the sequence must not be used again."""
        self.pool.release(sequence)

    def describe(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> SnapshotHeader:
        """What a snapshot of ``sequence`` after its first ``start`` tokens, a fork point or 0, contains; found on the
        host alone. Raises ValueError where it cannot be forked there.

        Args:
            stop: tokens after which it ends, a fork point: it is then that of a fork there, however ``sequence``
                continues, and nothing in it changes any more. None for all there are, with the exact tail.
        """
        return self.transfer.describe(sequence, start, stop)

    def open_reading(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> Reading:
        """Begins to read what ``describe`` says, layer by layer; holds what it reads until it is closed.

        Raises ValueError as ``describe`` does, and where there is nothing to read.
        """
        return self.transfer.open_reading(sequence, start, stop)

    def restore(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None
    ) -> Restoring:
        """A new sequence from the used parts of snapshots, which are then to be written, extended to ``start`` tokens
        by a prompt and to ``capacity`` by decoding.

        Raises OutOfBlocks, with nothing taken, and ValueError where this cache stores other bytes, or where the chain
        has gaps.

        Args:
            chain: headers, and the token up to which each is used: the next one starts there. That is a point where the
                sequence can be forked; for the last one also any token that is dense or in its exact tail.
            parent: a sequence that has what comes before the chain, which is shared up to the first header's start.
        """
        return self.transfer.restore(chain, start, capacity, parent)

    def restore_demand(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None
    ) -> Blocks:
        """Blocks that ``restore`` takes; raises the same ValueErrors."""
        return self.transfer.demand(chain, start, capacity, parent)

    def fork_demand(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> Blocks:
        """Blocks that ``fork`` takes; raises the same ValueErrors."""
        return self.pool.demand(self.pool.forked(sequence, length), start, capacity)

    def export(self, sequence: CachedSequence, start: int = 0) -> Snapshot:
        """Everything of ``sequence`` after its first ``start`` tokens (``describe``), as bytes of its own."""
        return self.transfer.export(sequence, start)

    def load(self, snapshots: Snapshot | Sequence[tuple[Snapshot, int]], capacity: int) -> CachedSequence:
        """A new sequence from a snapshot, or from a chain of them (``restore``), that may grow to ``capacity`` tokens.

        Raises ValueError where this cache stores other bytes, OutOfBlocks, with nothing taken, where it has no room.
        """
        if isinstance(snapshots, Snapshot):
            snapshots = [(snapshots, snapshots.header.length)]
        return self.transfer.load(snapshots, capacity)

    @property
    def form(self) -> str:
        """What another cache must have in common with this one to read its snapshots."""
        return self.transfer.form

    def stores_alike(self, other: KVCache, tokens: int) -> bool:
        """Whether what ``other`` exports of a prompt of ``tokens`` can be loaded here."""
        return self.transfer.form == other.transfer.form and all(
            tokens > one.spec.dense_limit or not one.spec.seals for one in (self, other)
        )

    def use(self) -> dict[str, TierUse]:
        """Bytes of each tier; may be called from any thread."""
        return {name: TierUse(tier.used_bytes, tier.total_bytes) for name, tier in self.store.tiers.items()}

    @property
    def fetches(self) -> FetchCounts | None:
        """Chunks fetched from the host so far; None where there is no buffer. May be read from any thread."""
        return None if self.decode.fetching is None else self.decode.fetching.counts

    def forget_fetches(self) -> None:
        """Resets the counts of fetched chunks."""
        if self.decode.fetching is not None:
            self.decode.fetching.forget()

    def diagnostics(self, sequence: CachedSequence) -> dict[str, Tensor]:
        """What the policy's parts report on how well a compressed sequence's states fit, by name, [layers] each,
        float32; the part that declares a name says what it means.

        The minimum over its segments, for the layers that are not skipped; empty where the sequence is dense.
        """
        names = self.parts.diagnostics
        if not (names and sequence.path and self.layout.compressed):
            return {}
        self.pool.arrived(sequence)
        states = [segment.state for segment in sequence.path]
        return {name: self.store.state[name][:, states, 0].amin(1) for name in names}

    # -- prefill ---------------------------------------------------------------------------------------------------

    def prefill_batch(self, sequences: list[tuple[CachedSequence, int]]) -> PrefillBatch:
        """Packs new tokens of admitted sequences: pairs of a sequence and how many tokens it gains (at least 1)."""
        return self.prefill.batch(sequences)

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores one layer's new tokens, in the policy's own form where the sequence is compressed."""
        self.prefill.finish_layer(layer, batch)

    def leave_prefill(self) -> None:
        """To be called when a prefill ends or is given up: what it still stores is waited for before anything else."""
        self.prefill.join()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        self.prefill.end(batch)

    # -- decode ----------------------------------------------------------------------------------------------------

    def plan_decode(self, sequences: Sequence[CachedSequence]) -> DecodePlan:
        """Plans one more token for each of ``sequences`` (at least one), and the sealing that is due before.

        Raises ValueError if one of them is at its capacity.
        """
        return self.decode.plan(sequences)

    def forecast_decode(
        self, sequences: Sequence[CachedSequence], joining: Sequence[tuple[CachedSequence, int]]
    ) -> DecodePlan | None:
        """Plans a step of padding rows, with the shapes of one that ``sequences`` will take together with those of
        ``joining``, whose prompts of that many tokens are being computed; None where these are not known."""
        return self.decode.forecast(sequences, joining)

    def decode_batch(self, plan: DecodePlan, numbers: Tensor | None = None) -> DecodeBatch:
        """``plan`` as the device sees it; ``numbers`` are the plan's, packed, where they are on the device already and
        what is due has been sealed (``seal_pages``): then only the plan's shapes are used, as a captured graph
        requires."""
        return self.decode.batch(plan, numbers)

    def rounded(self, plan: DecodePlan, max_batch: int) -> DecodePlan:
        """``plan`` with its shapes rounded up, so that few captured graphs serve many steps."""
        return rounded(plan, max_batch, self.spec, self.pool.tables)

    def padded_sealing(self, numbers: np.ndarray) -> np.ndarray:
        """``DecodePlan.sealing`` for a number of pages that is rounded up."""
        return padded(numbers, self.sealing.padding)

    def join_capture(self) -> None:
        """To be called where a capture fails halfway: it could not end before what runs on other streams is joined."""
        self.decode.side_stream.join_capture()

    def seal_pages(self, numbers: Tensor) -> None:
        """Seals pages in all layers: ``DecodePlan.sealing``, on the device."""
        self.sealing.seal_pages(numbers)

    def end_decode(self, plan: DecodePlan) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        self.decode.end(plan)

    @property
    def selection_hook(self) -> SelectionHook | None:
        """Called with layer, RoPE-rotated queries [R, H_q, d], the batch and what the index selects in a decode step;
        what it returns is attended to. Not called where nothing is selected (``KVSpec.selects``). To be set before the
        first step: captured graphs keep the hook that they were captured with."""
        return self.decode.hook

    @selection_hook.setter
    def selection_hook(self, hook: SelectionHook | None) -> None:
        self.decode.hook = hook

    @property
    def block_hook(self) -> BlockHook | None:
        """Called with layer, RoPE-rotated queries [n, H_q, d] and the blocks that a sparse prefill's tiles are to
        attend to (``select_blocks``); what it returns is attended to. There is none where prefill is dense."""
        return None if self.prefill.sparse is None else self.prefill.sparse.hook

    @block_hook.setter
    def block_hook(self, hook: BlockHook | None) -> None:
        if self.prefill.sparse is None:
            raise ValueError(f"prefill={self.spec.prefill!r} selects no blocks; use prefill='sparse'")
        self.prefill.sparse.hook = hook

    def take_attention_density(self) -> float | None:
        """Share of the blocks of keys that sparse prefills attended to since the last call; None where there were
        none. Waits for the device."""
        return None if self.prefill.sparse is None else self.prefill.sparse.take_density()

    # -- what is seen from outside ---------------------------------------------------------------------------------

    def apply_rope(self, q: Tensor, batch: DecodeBatch) -> Tensor:
        """Queries [B, H_q, d] of a decode step after RoPE."""
        return self.decode.apply_rope(q, batch)

    def exact_keys(self, layer: int, pages: Tensor) -> Tensor:
        """RoPE-rotated keys [H, E * 64, d] of exact pages, named by int64 [E] of a ``DecodeBatch.pages``."""
        return self.store.k[layer][pages].transpose(0, 1).flatten(1, 2)

    def exact_values(self, layer: int, pages: Tensor) -> Tensor:
        """The same for values."""
        return self.store.v[layer][pages].transpose(0, 1).flatten(1, 2)

    def sealed_rows(self, layer: int, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        """RoPE-rotated keys and values [H, P * 64, d] of the sealed pages of a batch of one row, as attention reads
        them."""
        if self.layout.skips(layer):
            return self.exact_keys(layer, batch.pages[0]), self.exact_values(layer, batch.pages[0])
        shape = self.shape.num_kv_heads, batch.pages.shape[1] * PAGE, self.shape.head_dim
        keys, values = torch.empty(2, *shape, dtype=self.dtype, device=self.device)
        self.ops.rebuild_rows(self.parts.keys.source(self.store, layer, batch), 0, keys, False)
        values_source = self.parts.values.source(self.store, layer, batch)
        self.ops.rebuild_rows(values_source, 0, values, self.spec.place == "host")
        return keys, values

    def selected_scores(
        self, layer: int, q: Tensor, batch: SealedBatch, selected: Selection, row: int
    ) -> tuple[Tensor, Tensor]:
        """Positions int64 [H, n] that a row of a selection hook's batch selected, -1 for none, and the scores by which
        each query head attends to them, float32 [H, H_q / H, n]."""
        return selected_scores(self.store, self.parts, layer, q, batch, selected, row)

    def exact_elsewhere(self, layer: int, batch: SealedBatch) -> Tensor:
        """Which chunks bool [R, H, P * C] of a batch's sealed pages are sink or outliers: attended to, not selected."""
        return self.store.excluded(layer, batch.pages, batch.first)

    # -- what a model's attention calls ----------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch | PrefillBlock) -> None:
        """Takes keys (before RoPE) and values [T, H, d] of the batch's new tokens."""
        if isinstance(batch, PrefillBlock):
            self.prefill.append(layer, k, v, batch)
        else:
            self.decode.append(layer, k, v, batch)

    def attend(self, layer: int, q: Tensor, batch: DecodeBatch | PrefillBlock) -> Tensor:
        """Attention [T, H_q, d] of the batch's new tokens, softmax scale 1 / sqrt(d); q is before RoPE.

        In prefill over everything, or over chosen blocks where the policy's prefill is sparse; in decode over [sink |
        outliers | selected | tail], or over everything where dense.
        """
        return self.begin(layer, q, batch)()

    def begin(self, layer: int, q: Tensor, batch: DecodeBatch | PrefillBlock) -> Callable[[], Tensor]:
        """Begins ``attend``, as far as it need not wait for values from the host; the returned function finishes it."""
        if isinstance(batch, PrefillBlock):
            out = self.prefill.attend(layer, q, batch)
            return lambda: out
        return self.decode.begin(layer, q, batch)
