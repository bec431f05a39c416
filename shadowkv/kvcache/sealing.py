"""Sealing: full pages of exact tokens leave the exact store for the policy's own form.

Generated tokens are projected on the basis of their sequence's prompt (ShadowKV+): pre-RoPE keys of a sequence and
of its continuation share the subspace.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.parts.base import SealedTokens
from shadowkv.kvcache.sequence import SlotTable
from shadowkv.kvcache.spec import PAGE
from shadowkv.kvcache.store import Store


class Sealing:
    """Writes sealed pages, for prefill and for decode."""

    def __init__(self, store: Store, parts: Parts, table: SlotTable) -> None:
        self.store, self.parts, self.table = store, parts, table
        self.spec = store.layout.spec

    def write(self, layer: int, tokens: SealedTokens, excluded: Tensor | None = None) -> None:
        """Stores full pages of one layer; ``excluded`` bool [n, H, C] marks chunks that are exact elsewhere."""
        for part in (self.parts.keys, self.parts.index, self.parts.values):
            part.seal(self.store, layer, tokens)
        self.store.page["excluded"][layer][tokens.pages] = False if excluded is None else excluded

    def seal_due(self, slots: np.ndarray) -> None:
        """Seals the oldest page of every compressed sequence in ``slots`` whose exact tail outgrew its window."""
        table = self.table
        tail = table.length[slots] - table.sealed[slots]
        due = slots[(table.sealed[slots] > 0) & (tail >= self.spec.local + PAGE)]
        if not len(due):
            return
        index = torch.from_numpy(due).to(self.store.compute)
        number = torch.from_numpy(table.sealed[due] // PAGE).to(self.store.compute)
        ring = torch.from_numpy(table.ring_pages[due]).to(self.store.compute)
        static = torch.from_numpy(table.static_pages[due]).to(self.store.compute)
        exact = table.exact[index, static + number % ring].long()
        pages, value_pages = table.sealed_pages[index, number].long(), table.value_pages[index, number].long()
        positions = number[:, None] * PAGE + torch.arange(PAGE, device=self.store.compute)
        for layer in range(self.store.layout.shape.num_layers):
            rotated = self.store.k[layer][exact].transpose(1, 2)
            values = self.store.v[layer][exact].transpose(1, 2)
            keys = self.store.ops.rotate(rotated, positions, self.store.rotary, inverse=True)
            self.write(layer, SealedTokens(index, pages, value_pages, keys, rotated, values))
        table.sealed[due] += PAGE
