"""The KV cache that models see: append, attend and finish_prefill over paged, ragged, compressed sequences.

ShadowKV, arXiv:2410.21465. What a policy does differs by its parts alone; sequence lifetimes are in ``pool.py``,
prefill in ``prefill.py``, sealing in ``sealing.py``.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import DecodeBatch, PrefillBatch, PrefillBlock, SealedBatch
from shadowkv.kvcache.layout import Blocks, Layout
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.pool import SequencePool
from shadowkv.kvcache.prefill import Prefill
from shadowkv.kvcache.sealing import Sealing
from shadowkv.kvcache.sequence import Sequence
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import PAGE, KVSpec
from shadowkv.kvcache.store import Store
from shadowkv.ops import Ops
from shadowkv.ops.rotate.tables import RopeConfig, RotaryTables


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
    ) -> None:
        self.device = torch.device(device)
        self.spec = spec.resolve(shape)
        self.shape, self.dtype = shape, dtype
        self.ops = ops or Ops(self.device)
        self.parts = build_parts(self.spec, shape, dtype)
        self.layout = Layout(self.spec, shape, dtype, self.parts)
        rotary = RotaryTables(rope, max_model_len, self.device)
        self.store = Store(self.layout, self.ops, rotary, slots, memory.device, memory.host, self.device)
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

    def decode_batch(self, sequences: Items[Sequence]) -> DecodeBatch:
        """Seals what is due and describes one more token for each of ``sequences`` (at least one).

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
        length, sealed = table.length[slots], table.sealed[slots]
        rows, start, position, ring, static_pages, static_tokens = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (
                slots, sealed, length, table.ring_pages[slots], table.static_pages[slots], table.static_tokens[slots]
            )
        )  # fmt: skip
        in_use = np.where(sealed > 0, table.ring_pages[slots], length // PAGE + 1)
        pages = table.exact[rows, : int((table.static_pages[slots] + in_use).max())].long()
        return DecodeBatch(
            slots,
            position,
            pages,
            _exact_counts(pages.shape[1], position + 1 - start, start, ring, static_pages, static_tokens),
            pages.gather(1, (static_pages + position // PAGE % ring)[:, None]).squeeze(1),
            position % PAGE,
            self._sealed_batch(rows, length, sealed),
        )

    def end_decode(self, batch: DecodeBatch) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        self.pool.table.length[batch.slots] += 1

    def _sealed_batch(self, slots: Tensor, length: np.ndarray, sealed: np.ndarray) -> SealedBatch | None:
        rows = sealed.nonzero()[0]
        if not len(rows):
            return None
        table, width = self.pool.table, int(sealed.max()) // PAGE
        budget = self.spec.budget_chunks(length[rows])
        index = torch.from_numpy(rows).to(self.device)
        return SealedBatch(
            index,
            slots[index],
            table.sealed_pages[slots[index], :width].long(),
            table.value_pages[slots[index], :width].long(),
            torch.from_numpy(sealed[rows] // self.spec.chunk).to(self.device),
            torch.from_numpy(budget).to(self.device),
            int(budget.max()),
        )

    # -- what a model's attention calls ----------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch | PrefillBlock) -> None:
        """Takes keys (before the rotation) and values [T, H, d] of the batch's new tokens."""
        if isinstance(batch, PrefillBlock):
            self.prefill.append(layer, k, v, batch)
            return
        rotated = self.ops.rotate(k, batch.positions, self.store.rotary)
        self.store.k[layer][batch.write_page, :, batch.write_offset] = rotated
        self.store.v[layer][batch.write_page, :, batch.write_offset] = v

    def attend(self, layer: int, q: Tensor, batch: DecodeBatch | PrefillBlock) -> Tensor:
        """Attention [T, H_q, d] of the batch's new tokens, softmax scale 1 / sqrt(d); q is before the rotation.

        Exact in prefill; in decode over [sink | outliers | selected | tail], or over everything where dense.
        """
        if isinstance(batch, PrefillBlock):
            return self.prefill.attend(layer, q, batch)
        q = self.ops.rotate(q, batch.positions, self.store.rotary)
        out, lse = self.ops.paged_attention(q, self.store.k[layer], self.store.v[layer], batch.pages, batch.counts)
        if batch.sealed is not None:
            rows = batch.sealed.rows
            found = self._attend_sealed(layer, q[rows], batch.sealed)
            out[rows] = self.ops.merge_attention([(out[rows], lse[rows]), found])
        return out

    def select(self, layer: int, q: Tensor, batch: SealedBatch) -> Tensor:
        """Chunks int64 [R, H, k] that rotated queries [R, H_q, d] attend to; -1 is none."""
        scores = self.parts.index.scores(self.store, layer, q, batch)
        return self.ops.select_chunks(scores, batch.budget, batch.max_budget)

    def _attend_sealed(self, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        selected = self.select(layer, q, batch)
        keys = self.parts.keys.gather(self.store, layer, batch, selected)
        values = self.parts.values.gather(self.store, layer, batch, selected)
        valid = (selected >= 0).repeat_interleave(self.spec.chunk, dim=-1)
        return self.ops.selected_attention(q, keys, values, valid)


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
