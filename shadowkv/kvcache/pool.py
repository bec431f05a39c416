"""Sequence lifetimes: who owns which slot and which blocks, from admission to release.

A sequence owns every page it may need up to its capacity from the start, so decoding never allocates and never
runs out of memory half way.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from shadowkv.kvcache.layout import BlockCount, Blocks, PageCount
from shadowkv.kvcache.memory import OutOfPages, Tier
from shadowkv.kvcache.sequence import Sequence, SlotTable
from shadowkv.kvcache.spec import PAGE
from shadowkv.kvcache.store import Store

KINDS = ("dense_blocks", "exact_blocks", "sealed_blocks", "host")
"""Lists of a sequence's blocks."""


class SequencePool:
    """Slots and pages of all sequences.

    Args:
        store: the memory.
        slots: sequences held at once.
        max_model_len: longest sequence, in tokens.
    """

    def __init__(self, store: Store, slots: int, max_model_len: int) -> None:
        self.store, self.layout = store, store.layout
        self.max_model_len = max_model_len
        longest = self.layout.pages(0, max_model_len)
        need = self.layout.block_count(longest)
        exact = max(need.dense, need.exact) * self.layout.exact_per_block
        self.table = SlotTable(slots, exact, max(1, longest.sealed), store.compute)
        padding, spare = self.table.padding_slot, [store.device.spare]
        self.table.set_exact(padding, [], spare)
        self.table.set_sealed(padding, spare, [store.host.spare] if self.layout.host_fields else spare)
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def total(self) -> Blocks:
        """Blocks of each tier."""
        return Blocks(self.store.device.num_blocks, self.store.host.num_blocks)

    @property
    def free(self) -> Blocks:
        """Blocks of each tier that no sequence owns."""
        return Blocks(self.store.device.free_blocks, self.store.host.free_blocks)

    @property
    def free_slots(self) -> int:
        """Sequences that can still be held."""
        return len(self._free_slots)

    def slots_of(self, sequences: Items[Sequence]) -> np.ndarray:
        """Slots of ``sequences``, int64."""
        return np.fromiter((sequence.slot for sequence in sequences), np.int64, len(sequences))

    def demand(self, start: int, capacity: int) -> Blocks:
        """Blocks of a new sequence with a prompt of ``start`` tokens that may grow to ``capacity``."""
        return self.layout.blocks(self.layout.pages(start, capacity))

    def growth(self, sequence: Sequence, start: int, capacity: int) -> Blocks:
        """Blocks that ``sequence`` lacks to be extended to ``start`` tokens by a prompt, then to ``capacity``."""
        return self._missing(sequence, start, capacity).total

    def allocate(self, start: int, capacity: int) -> Sequence:
        """A new, empty sequence; raises OutOfPages, with nothing taken, if a slot or blocks are lacking."""
        if not self._free_slots:
            raise OutOfPages("every sequence slot is taken")
        sequence = Sequence(self._free_slots[-1])
        self.extend(sequence, start, capacity)
        self._free_slots.pop()
        if self.store.buffer is not None:
            self.store.buffer.reset(sequence.slot)  # once: as long as it lives its sealed chunks never change
        return sequence

    def extend(self, sequence: Sequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` what ``growth`` says; raises OutOfPages, with nothing taken, if blocks are lacking."""
        if not start <= capacity <= self.max_model_len:
            raise ValueError(f"{start=} <= {capacity=} <= max_model_len={self.max_model_len} does not hold")
        new = self._missing(sequence, start, capacity)
        if not new.total.within(self.free):
            raise OutOfPages(f"the sequence needs {new.total}, free are {self.free}")
        for kind in KINDS:
            getattr(sequence, kind).extend(self._tier(kind).allocate(getattr(new, kind.removesuffix("_blocks"))))
        sequence.capacity = capacity
        self._name_pages(sequence)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forgets the newest tokens; only exact ones can be forgotten, so ``length`` must reach the sealed ones."""
        if not self.table.sealed[sequence.slot] <= length <= self.table.length[sequence.slot]:
            raise ValueError(f"cannot cut the sequence to {length} tokens")
        self.table.length[sequence.slot] = length

    def trim(self, sequence: Sequence) -> None:
        """Gives back the pages of a finished sequence that hold nothing; it can be extended again."""
        length, sealed = int(self.table.length[sequence.slot]), int(self.table.sealed[sequence.slot])
        sequence.capacity = length
        pages = PageCount(dense=-(-length // PAGE))
        if sealed:
            pages = PageCount(0, self.layout.spec.static_pages, self.layout.spec.ring_pages, sealed // PAGE)
        self._keep(sequence, self.layout.block_count(pages))

    def release(self, sequence: Sequence) -> None:
        """Gives back everything; the sequence must not be used again."""
        self._keep(sequence, BlockCount())
        self.table.clear(sequence.slot)
        self._free_slots.append(sequence.slot)

    def become_compressed(self, sequence: Sequence, sealed: int) -> None:
        """Notes that a dense sequence's tokens now stand in its static, sealed and ring pages."""
        slot = sequence.slot
        self.table.sealed[slot] = sealed
        self.table.static_tokens[slot] = self.layout.spec.static_tokens
        self._keep(sequence, replace(sequence.owned, dense=0))

    def sealed_pages(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Granules of the sequence's sealed pages and of those that hold their values, used or not yet."""
        pages = self.store.sealed_granules(sequence.sealed_blocks)
        return pages, sequence.host if self.layout.host_fields else pages

    def _missing(self, sequence: Sequence, start: int, capacity: int) -> BlockCount:
        wanted = self.layout.pages(start, capacity)
        if self.table.sealed[sequence.slot]:
            wanted = PageCount(sealed=self.layout.spec.sealed_pages(capacity))
        return self.layout.block_count(wanted).lacking(sequence.owned)

    def _name_pages(self, sequence: Sequence) -> None:
        spec = self.layout.spec
        sequence.dense = self.store.exact_granules(sequence.dense_blocks)
        exact = self.store.exact_granules(sequence.exact_blocks)
        sequence.static, ring = exact[: spec.static_pages], exact[spec.static_pages :]
        sequence.ring = ring[: spec.ring_pages]
        if self.table.sealed[sequence.slot]:
            self.table.set_exact(sequence.slot, sequence.static, sequence.ring)
        else:
            self.table.set_exact(sequence.slot, [], sequence.dense)
        pages, value_pages = self.sealed_pages(sequence)
        width = self.table.sealed_pages.shape[1]
        self.table.set_sealed(sequence.slot, pages[:width], value_pages[:width])

    def _keep(self, sequence: Sequence, count: BlockCount) -> None:
        """Gives back the blocks beyond ``count``."""
        for kind in KINDS:
            owned: list[int] = getattr(sequence, kind)
            keep = getattr(count, kind.removesuffix("_blocks"))
            self._tier(kind).release(owned[keep:])
            del owned[keep:]
        self._name_pages(sequence)

    def _tier(self, kind: str) -> Tier:
        return self.store.host if kind == "host" else self.store.device
