"""Sealing: full pages of exact tokens leave the exact store for the policy's own form.

Generated tokens are projected on the basis of their sequence's prompt (ShadowKV+): pre-RoPE keys of a sequence and
of its continuation share the subspace.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.parts.base import SealedTokens
from shadowkv.kvcache.sequence import SlotTable
from shadowkv.kvcache.spec import PAGE
from shadowkv.kvcache.store import Store

PAGES_AT_ONCE = 512
"""Pages of one layer that are coded at a time, to bound what that takes beside them."""


class Sealing:
    """Writes sealed pages, for prefill and for decode.

    Attributes:
        launch: gives the numbers of due pages to ``seal_pages`` on the device; an engine may put a captured graph here.
    """

    def __init__(self, store: Store, parts: Parts, table: SlotTable) -> None:
        self.store, self.parts, self.table = store, parts, table
        self.spec = store.layout.spec
        self.launch: Callable[[np.ndarray], None] = self._launch

    def write(self, tokens: SealedTokens, excluded: Tensor | None = None) -> None:
        """Stores full pages; ``excluded`` bool [L, n, H, C] marks chunks that are exact elsewhere."""
        layers = tokens.keys.shape[0]
        for part in (self.parts.keys, self.parts.index, self.parts.values):
            for some in tokens.split(max(1, PAGES_AT_ONCE // layers)):
                part.seal(self.store, some)
        if excluded is not None:
            self.parts.index.exclude(self.store, tokens.layers, tokens.pages, excluded)
        if "excluded" not in self.store.page:
            return
        if excluded is None:
            shape = layers, len(tokens.pages), *self.store.page["excluded"].shape[2:]
            # Not simply False: a number would have to come from the host, which a captured graph cannot wait for.
            excluded = torch.zeros(shape, dtype=torch.bool, device=self.store.compute)
        self.store.write("excluded", tokens.layers, tokens.pages, excluded)

    def _launch(self, numbers: np.ndarray) -> None:
        self.seal_pages(torch.from_numpy(numbers).to(self.store.compute))

    def seal_due(self, slots: np.ndarray) -> None:
        """Seals the oldest page of every compressed sequence in ``slots`` whose exact tail outgrew its window."""
        table = self.table
        tail = table.length[slots] - table.sealed[slots]
        due = slots[(table.sealed[slots] > 0) & (tail >= self.spec.local + PAGE)]
        if len(due):
            page = table.sealed[due] // PAGE
            self.launch(np.stack((due, page, table.static_pages[due] + page % table.ring_pages[due])))
            table.sealed[due] += PAGE

    def seal_pages(self, numbers: Tensor) -> None:
        """Seals pages in all layers; ``numbers`` int64 [3, n]: slots, page numbers, columns of the exact page table."""
        slots, number, column = numbers
        exact, pages, value_pages = (
            table[slots, where].long()
            for table, where in (
                (self.table.exact, column), (self.table.sealed_pages, number), (self.table.value_pages, number)
            )
        )  # fmt: skip
        rotated, values = self.store.k[:, exact].transpose(2, 3), self.store.v[:, exact].transpose(2, 3)
        positions = number[:, None] * PAGE + torch.arange(PAGE, device=self.store.compute)
        keys = self.store.ops.rotate(rotated, positions.expand(len(rotated), -1, -1), self.store.rotary, inverse=True)
        self.write(SealedTokens(slice(None), slots, pages, value_pages, keys, rotated, values))
