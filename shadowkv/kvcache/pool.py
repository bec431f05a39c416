"""Sequence lifetimes: who owns which slot and which blocks, from admission to release.

A sequence owns every page it may need up to its capacity from the start, so decoding never allocates and never
runs out of memory half way.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from shadowkv.kvcache.layout import Blocks, PageCount
from shadowkv.kvcache.memory import OutOfPages
from shadowkv.kvcache.sequence import Sequence, SlotTable
from shadowkv.kvcache.spec import PAGE
from shadowkv.kvcache.store import Store


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
        exact = max(longest.dense, longest.static + longest.ring)
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
        return self.layout.blocks(self._missing(sequence, start, capacity))

    def allocate(self, start: int, capacity: int) -> Sequence:
        """A new, empty sequence; raises OutOfPages, with nothing taken, if a slot or blocks are lacking."""
        if not self._free_slots:
            raise OutOfPages("every sequence slot is taken")
        sequence = Sequence(self._free_slots[-1])
        self.extend(sequence, start, capacity)
        self._free_slots.pop()
        return sequence

    def extend(self, sequence: Sequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` what ``growth`` says; raises OutOfPages, with nothing taken, if blocks are lacking."""
        if not start <= capacity <= self.max_model_len:
            raise ValueError(f"{start=} <= {capacity=} <= max_model_len={self.max_model_len} does not hold")
        new = self._missing(sequence, start, capacity)
        need = self.layout.blocks(new)
        if not need.within(self.free):
            raise OutOfPages(f"the sequence needs {need}, free are {self.free}")
        device, host = self.store.device, self.store.host
        sequence.dense += device.allocate(new.dense)
        sequence.static += device.allocate(new.static)
        sequence.ring += device.allocate(new.ring)
        sequence.sealed_blocks += device.allocate(need.device - new.dense - new.static - new.ring)
        sequence.host += host.allocate(need.host)
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
        pages = sealed // PAGE
        self._cut(sequence, "dense", -(-length // PAGE) if not sealed else 0)
        if not sealed:
            self._cut(sequence, "static", 0)
            self._cut(sequence, "ring", 0)
        self._cut(sequence, "sealed_blocks", -(-pages // max(1, self.layout.sealed_per_block)))
        self._cut(sequence, "host", pages if self.layout.host_fields else 0)

    def release(self, sequence: Sequence) -> None:
        """Gives back everything; the sequence must not be used again."""
        for kind in ("dense", "static", "ring", "sealed_blocks", "host"):
            self._cut(sequence, kind, 0)
        self.table.clear(sequence.slot)
        self._free_slots.append(sequence.slot)

    def become_compressed(self, sequence: Sequence, sealed: int) -> None:
        """Notes that a dense sequence's tokens now stand in its static, sealed and ring pages."""
        slot = sequence.slot
        self._cut(sequence, "dense", 0)
        self.table.sealed[slot] = sealed
        self.table.static_tokens[slot] = self.layout.spec.static_tokens
        self._name_pages(sequence)

    def sealed_pages(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Granules of the sequence's sealed pages and of those that hold their values, used or not yet."""
        pages = self.store.sealed_granules(sequence.sealed_blocks)
        return pages, sequence.host if self.layout.host_fields else pages

    def _missing(self, sequence: Sequence, start: int, capacity: int) -> PageCount:
        wanted = self.layout.pages(start, capacity)
        if self.table.sealed[sequence.slot]:
            wanted = PageCount(sealed=self.layout.spec.sealed_pages(capacity))
        owned = len(sequence.sealed_blocks) * self.layout.sealed_per_block
        if self.layout.host_fields:
            owned = min(owned, len(sequence.host))
        return PageCount(
            max(0, wanted.dense - len(sequence.dense)),
            max(0, wanted.static - len(sequence.static)),
            max(0, wanted.ring - len(sequence.ring)),
            max(0, wanted.sealed - owned),
        )

    def _name_pages(self, sequence: Sequence) -> None:
        if self.table.sealed[sequence.slot]:
            self.table.set_exact(sequence.slot, sequence.static, sequence.ring)
        else:
            self.table.set_exact(sequence.slot, [], sequence.dense)
        pages, value_pages = self.sealed_pages(sequence)
        width = self.table.sealed_pages.shape[1]
        self.table.set_sealed(sequence.slot, pages[:width], value_pages[:width])

    def _cut(self, sequence: Sequence, kind: str, keep: int) -> None:
        owned: list[int] = getattr(sequence, kind)
        tier = self.store.host if kind == "host" else self.store.device
        tier.release(owned[keep:])
        del owned[keep:]
