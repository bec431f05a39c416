"""A cached sequence: its slot, the pages it owns and how far it has come; and the tables that kernels read.

Tokens of a dense sequence are all exact. A compressed one has sealed pages [0, sealed), the static exact tokens
(sink and outliers, per kv head) and an exact tail [sealed, length) in a ring of pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from shadowkv.kvcache.layout import BlockCount, Blocks


@dataclass(eq=False)
class Sequence:
    """Pages of one sequence, all owned from admission on: nothing is allocated while it decodes.

    Attributes:
        slot: row of the tables and of the per-sequence state.
        capacity: tokens it may grow to.
        dense_blocks, exact_blocks, sealed_blocks: granules of its device blocks: for a dense sequence's tokens, for a
            compressed one's exact tokens and for its sealed pages.
        host: granules of its host pages.
        dense, static, ring: granules of the exact pages in those blocks.
    """

    slot: int
    capacity: int = 0
    dense_blocks: list[int] = field(default_factory=list)
    exact_blocks: list[int] = field(default_factory=list)
    sealed_blocks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    dense: list[int] = field(default_factory=list)
    static: list[int] = field(default_factory=list)
    ring: list[int] = field(default_factory=list)

    @property
    def owned(self) -> BlockCount:
        """Blocks of each kind that it owns."""
        return BlockCount(len(self.dense_blocks), len(self.exact_blocks), len(self.sealed_blocks), len(self.host))

    @property
    def blocks(self) -> Blocks:
        """Blocks of each tier that it owns."""
        return self.owned.total


class SlotTable:
    """Numbers and page tables of all slots; numbers on the host, tables where the cache computes.

    The slot after the last is nobody's: the rows that fill up a captured batch name it.

    Attributes:
        padding_slot: the slot after the last.
        length, sealed: int64 [slots], tokens cached and tokens sealed.
        static_tokens, static_pages, ring_pages: int64 [slots], the shape of the exact pages; a dense sequence is a
            ring as long as itself.
        exact: int32 [slots, E]; sealed_pages, value_pages: int32 [slots, P]: granules.
    """

    def __init__(self, slots: int, exact_width: int, sealed_width: int, device: torch.device) -> None:
        rows = slots + 1
        self.padding_slot = slots
        self.length = np.zeros(rows, np.int64)
        self.sealed = np.zeros(rows, np.int64)
        self.static_tokens = np.zeros(rows, np.int64)
        self.static_pages = np.zeros(rows, np.int64)
        self.ring_pages = np.ones(rows, np.int64)
        self.exact = torch.zeros(rows, exact_width, dtype=torch.int32, device=device)
        self.sealed_pages = torch.zeros(rows, sealed_width, dtype=torch.int32, device=device)
        self.value_pages = torch.zeros(rows, sealed_width, dtype=torch.int32, device=device)

    def clear(self, slot: int) -> None:
        """Forgets what a slot held."""
        for array in (self.length, self.sealed, self.static_tokens, self.static_pages):
            array[slot] = 0

    def set_exact(self, slot: int, static: list[int], ring: list[int]) -> None:
        """Names a slot's exact pages."""
        self.static_pages[slot], self.ring_pages[slot] = len(static), max(1, len(ring))
        self._write(self.exact, slot, static + ring)

    def set_sealed(self, slot: int, pages: list[int], value_pages: list[int]) -> None:
        """Names a slot's sealed pages."""
        self._write(self.sealed_pages, slot, pages)
        self._write(self.value_pages, slot, value_pages)

    @staticmethod
    def _write(table: torch.Tensor, slot: int, pages: list[int]) -> None:
        table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
