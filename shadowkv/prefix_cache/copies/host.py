"""The host tier: bytes of snapshots in slabs of host memory, pinned where a GPU copies to and from them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import pin

SLAB_BYTES = 2**22
"""Size of a slab: copying 4 MiB takes 80 us on a bus of 50 GB/s, ten times as long as launching the copy."""


class HostTier:
    """Slabs to take and give back.

    Args:
        nbytes: total of all slabs, rounded down.
        device: the one that copies to and from them.

    Raises MemoryError where there is not enough memory.
    """

    def __init__(self, nbytes: int, device: torch.device, slab_bytes: int = SLAB_BYTES) -> None:
        self.slab_bytes, self.num_slabs = slab_bytes, nbytes // slab_bytes
        try:
            memory = np.zeros((self.num_slabs, slab_bytes), np.uint8)
        except MemoryError as error:
            raise MemoryError(f"cannot allocate {nbytes / 2**30:.1f} GiB of host memory for snapshots") from error
        if device.type == "cuda" and self.num_slabs:
            weakref.finalize(self, pin(memory))
        self._memory = torch.from_numpy(memory)
        self._free = list(range(self.num_slabs - 1, -1, -1))

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.num_slabs * self.slab_bytes

    @property
    def free_slabs(self) -> int:
        """Slabs that are not taken."""
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of those that are taken."""
        return self.total_bytes - self.free_slabs * self.slab_bytes

    def slabs_of(self, nbytes: int) -> int:
        """Number of slabs that hold ``nbytes`` bytes."""
        return -(-nbytes // self.slab_bytes)

    def take(self, nbytes: int) -> list[int] | None:
        """Slabs for ``nbytes`` bytes; None, with nothing taken, where there are too few."""
        count = self.slabs_of(nbytes)
        return None if count > len(self._free) else [self._free.pop() for _ in range(count)]

    def give(self, slabs: list[int]) -> None:
        """Returns slabs to the tier."""
        self._free += slabs

    def buffers(self, slabs: list[int], nbytes: int) -> list[Tensor]:
        """The first ``nbytes`` of slabs as uint8 tensors, in order."""
        return [part for part, _ in self.pieces(slabs, 0, nbytes)]

    def pieces(self, slabs: list[int], start: int, stop: int) -> Iterator[tuple[Tensor, slice]]:
        """Bytes ``start`` to ``stop`` of what the slabs hold: uint8 tensors, and which of those bytes each is."""
        at = start
        while at < stop:
            number, offset = divmod(at, self.slab_bytes)
            count = min(stop - at, self.slab_bytes - offset)
            yield self._memory[slabs[number], offset : offset + count], slice(at - start, at - start + count)
            at += count
