"""The KV cache that models see: append, attend and finish_prefill over paged, ragged, compressed sequences.

ShadowKV, arXiv:2410.21465. What a policy does differs by its parts alone; sequence lifetimes are in ``pool.py``,
prefill in ``prefill.py``, sealing in ``sealing.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import DecodeBatch, DecodePlan, PrefillBatch, PrefillBlock, SealedBatch
from shadowkv.kvcache.beside import Beside
from shadowkv.kvcache.fetching import Fetching
from shadowkv.kvcache.layout import Blocks, Layout
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.pool import SequencePool
from shadowkv.kvcache.prefill import Prefill
from shadowkv.kvcache.sealing import Sealing
from shadowkv.kvcache.sequence import Sequence
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import FETCH_BUFFER, PAGE, KVSpec
from shadowkv.kvcache.store import Store
from shadowkv.ops import Ops
from shadowkv.ops.rotate.tables import RopeConfig, RotaryTables
from shadowkv.ops.select_by_sketch.draws import Draws


class KVCache:
    """Keys and values of every sequence that an engine holds.

    Args:
        spec: the policy; resolved here for ``shape``.
        shape: the model's attention sizes.
        rope: the model's rotation; queries and keys arrive before it.
        slots: sequences that can be held at once, running or finished.
        max_model_len: longest sequence, in tokens.
        memory: blocks of each tier.
        dtype: of exact keys and values and of what the parts store at full precision.
        device: where attention is computed.
        ops: backends; None chooses for ``device``.
        fetch_buffer: chunks that a buffer on the device keeps of values on the host, in those that a step selects of
            the longest context: 0 for no buffer, or at least 1.
    """

    def __init__(
        self,
        spec: KVSpec,
        shape: ModelShape,
        rope: RopeConfig,
        *,
        slots: int,
        max_model_len: int,
        memory: Blocks,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: Ops | None = None,
        fetch_buffer: float = FETCH_BUFFER,
    ) -> None:
        self.device = torch.device(device)
        self.spec = spec.resolve(shape)
        self.shape, self.dtype = shape, dtype
        self.ops = ops or Ops(self.device)
        self.parts = build_parts(self.spec, shape, dtype)
        self.layout = Layout(self.spec, shape, dtype, self.parts, max_model_len, fetch_buffer)
        rotary = RotaryTables(rope, max_model_len, self.device)
        self.store = Store(self.layout, self.ops, rotary, slots, memory.device, memory.host, self.device)
        self.beside = Beside(self.store.compute, captured=True)
        self.fetching = Fetching(self.store, self.beside) if self.store.buffer is not None else None
        self.pool = SequencePool(self.store, slots, max_model_len)
        self.sealing = Sealing(self.store, self.parts, self.pool.table)
        self.prefill = Prefill(self.store, self.parts, self.pool, self.sealing)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def prefill_batch(self, sequences: list[tuple[Sequence, int]]) -> PrefillBatch:
        """Packs new tokens of admitted sequences: pairs of a sequence and how many tokens it gains (at least 1)."""
        return self.prefill.batch(sequences)

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores one layer's new tokens, building the low-rank form and the index where the sequence is compressed."""
        self.prefill.finish_layer(layer, batch)

    def leave_prefill(self) -> None:
        """To be called when a prefill ends or is given up: what it still stores is waited for before anything else."""
        self.prefill.join()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        self.prefill.end(batch)

    def kept_energy(self, sequence: Sequence) -> Tensor | None:
        """Share of the squared norm of a compressed sequence's keys that its low-rank form keeps, float32 [num_layers].

        None where the policy has no low-rank keys or the sequence is dense.
        """
        if "kept_energy" not in self.store.state or not self.pool.table.sealed[sequence.slot]:
            return None
        return self.store.state["kept_energy"][:, sequence.slot, 0]

    # -- decode ----------------------------------------------------------------------------------------------------

    def plan_decode(self, sequences: Items[Sequence]) -> DecodePlan:
        """Seals what is due and plans one more token for each of ``sequences`` (at least one).

        Raises ValueError if one of them is at its capacity.
        """
        table, slots = self.pool.table, self.pool.slots_of(sequences)
        capacity = np.fromiter((sequence.capacity for sequence in sequences), np.int64, len(sequences))
        if (table.length[slots] >= capacity).any():
            raise ValueError(f"a sequence is at its capacity: lengths {table.length[slots]}, capacities {capacity}")
        if self.spec.seals:
            outgrown = (table.sealed[slots] == 0) & (table.length[slots] >= self.spec.dense_limit)
            for row in outgrown.nonzero()[0]:
                self.prefill.compress_dense(sequences[row])
            self.sealing.seal_due(slots)
        length, sealed, ring, static = (
            numbers[slots] for numbers in (table.length, table.sealed, table.ring_pages, table.static_pages)
        )
        budget = np.where(sealed > 0, self.spec.budget_chunks(length), 0)
        drawn = self.spec.drawn_chunks(budget, sealed)
        exact = static + np.where(sealed > 0, ring, length // PAGE + 1)
        return DecodePlan(
            slots,
            np.stack((slots, length, sealed, ring, static, table.static_tokens[slots], budget - drawn, drawn)),
            int(exact.max()),
            int(sealed.max()) // PAGE,
            int(budget.max()),
            1 if self.fetching is None else self.fetching.micro_batches(budget),
        )

    def decode_batch(self, plan: DecodePlan, numbers: Tensor | None = None) -> DecodeBatch:
        """What ``plan`` means to the device, from shapes that the plan fixes and numbers that the device has.

        Args:
            numbers: the plan's, already on the device; with it nothing but the plan's shapes is used, so that the
                result can be captured in a graph and used for other plans of the same shapes.
        """
        if numbers is None:
            numbers = torch.from_numpy(plan.numbers).to(self.device)
        slots, length, sealed, ring, static_pages, static_tokens, _, _ = numbers
        table = self.pool.table
        pages = table.exact[slots, : plan.exact_pages].long()
        sealed_batch = compressed = None
        if plan.sealed_pages:
            # On a GPU shapes may not depend on which rows these are, as steps are captured in graphs; micro-batches,
            # which a GPU alone has use for, are cut by rows of the whole batch.
            if self.device.type == "cpu" and plan.micro_batches == 1 and not sealed.all():
                compressed = sealed.nonzero().squeeze(1)
            sealed_batch = self._sealed_batch(plan, numbers if compressed is None else numbers[:, compressed])
        return DecodeBatch(
            length,
            pages,
            _exact_counts(pages.shape[1], length + 1 - sealed, sealed, ring, static_pages, static_tokens),
            pages.gather(1, (static_pages + length // PAGE % ring)[:, None]).squeeze(1),
            length % PAGE,
            sealed_batch,
            compressed,
        )

    def _sealed_batch(self, plan: DecodePlan, numbers: Tensor) -> SealedBatch:
        """The sealed pages of rows of a plan, which ``numbers`` int64 [8, R] are of."""
        slots, length, sealed, _, _, _, found, drawn = numbers
        table = self.pool.table
        pages = value_pages = table.sealed_pages[slots, : plan.sealed_pages].long()
        if self.spec.place == "host":  # otherwise one tensor says so to kernels that look a page up once
            value_pages = table.value_pages[slots, : plan.sealed_pages].long()
        return SealedBatch(
            slots,
            pages,
            value_pages,
            sealed // PAGE,
            sealed // self.spec.chunk,
            found,
            plan.max_budget,
            Draws(drawn, length) if self.spec.drawn else None,
        )

    def end_decode(self, plan: DecodePlan) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        self.pool.table.length[plan.slots] += 1
        if self.fetching is not None:
            self.fetching.publish()

    # -- what a model's attention calls ----------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch | PrefillBlock) -> None:
        """Takes keys (before the rotation) and values [T, H, d] of the batch's new tokens."""
        if isinstance(batch, PrefillBlock):
            self.prefill.append(layer, k, v, batch)
            return
        if batch.sealed is None or self.fetching is not None:
            self._append_exact(layer, k, v, batch)
        else:  # where exact attention, which reads them, is as well
            self.beside.start(lambda: self._append_exact(layer, k, v, batch))

    def attend(self, layer: int, q: Tensor, batch: DecodeBatch | PrefillBlock) -> Tensor:
        """Attention [T, H_q, d] of the batch's new tokens, softmax scale 1 / sqrt(d); q is before the rotation.

        Exact in prefill; in decode over [sink | outliers | selected | tail], or over everything where dense.
        """
        return self.begin(layer, q, batch)()

    def begin(self, layer: int, q: Tensor, batch: DecodeBatch | PrefillBlock) -> Callable[[], Tensor]:
        """Begins ``attend``, as far as it need not wait for values from the host; what is returned finishes it."""
        if isinstance(batch, PrefillBlock):
            out = self.prefill.attend(layer, q, batch)
            return lambda: out
        q = self.ops.rotate(q, batch.positions, self.store.rotary)
        if batch.sealed is not None and self.fetching is not None:
            return self._begin_fetched(layer, q, batch, batch.sealed, self.fetching)
        out = self._attend(layer, q, batch)
        return lambda: out

    def select(self, layer: int, q: Tensor, batch: SealedBatch) -> Selection:
        """What rotated queries [B, H_q, d] attend to of the sealed chunks."""
        return self.parts.index.select(self.store, layer, q, batch)

    def _attend(self, layer: int, q: Tensor, batch: DecodeBatch) -> Tensor:
        if batch.sealed is None:
            return self._attend_exact(layer, q, batch)[0]
        exact = self.beside.start(lambda: self._attend_exact(layer, q, batch))  # a little, while chunks are searched
        found = self._attend_sealed(layer, batch.of_sealed(q), batch.sealed)
        out, lse = exact()
        merged = self.ops.merge_attention([(batch.of_sealed(out), batch.of_sealed(lse)), found])
        return batch.with_sealed(out, merged)

    def _append_exact(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch) -> None:
        pages = self.store.k[layer], self.store.v[layer]
        self.ops.append_tokens(k, v, batch.positions, self.store.rotary, *pages, batch.write_page, batch.write_offset)

    def _attend_exact(self, layer: int, q: Tensor, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        out, lse = self.ops.paged_attention(q, self.store.k[layer], self.store.v[layer], batch.pages, batch.counts)
        return out, lse

    def _attend_sealed(self, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        selected = self.select(layer, q, batch)
        keys = self.parts.keys.source(self.store, layer, batch)
        values = self.parts.values.source(self.store, layer, batch)
        return self.ops.attend_selected(q, keys, values, selected.chunks, selected.log_weight)

    def _begin_fetched(
        self, layer: int, q: Tensor, batch: DecodeBatch, sealed: SealedBatch, fetching: Fetching
    ) -> Callable[[], Tensor]:
        """In portions of the rows: values of one cross the bus while others are scored or attended."""
        queries, started = batch.of_sealed(q), []
        for rows in fetching.portions(sealed):
            portion = sealed.rows(rows)
            selected = self.select(layer, queries[rows], portion).chunks
            fetch = fetching.start(layer, selected, portion, self.parts.values.source(self.store, layer, portion))
            started.append((rows, portion, selected, fetch))
        out, lse = self._attend_exact(layer, q, batch)  # while the bus is busy

        def finish() -> Tensor:
            outs, exact = [], (batch.of_sealed(out), batch.of_sealed(lse))
            for rows, portion, selected, fetch in started:
                keys = self.parts.keys.source(self.store, layer, portion)
                found = self.ops.attend_selected(queries[rows], keys, fetch.wait(), selected)
                outs.append(self.ops.merge_attention([(exact[0][rows], exact[1][rows]), found]))
            return batch.with_sealed(out, outs[0] if len(outs) == 1 else torch.cat(outs))

        return finish


def _exact_counts(
    width: int, tail: Tensor, sealed: Tensor, ring: Tensor, static_pages: Tensor, static_tokens: Tensor
) -> Tensor:
    """Valid tokens int64 [B, width] of each exact page: first the static ones, then the ring that holds the tail."""
    column = torch.arange(width, device=tail.device)
    ring, first = ring[:, None], static_pages[:, None]
    turn = (column - first - sealed[:, None] // PAGE) % ring  # how many pages after the tail's oldest
    in_ring = (column >= first) & (column < first + ring)
    counts = torch.where(in_ring, tail[:, None] - PAGE * turn, static_tokens[:, None] - PAGE * column)
    return counts.clamp(0, PAGE)
