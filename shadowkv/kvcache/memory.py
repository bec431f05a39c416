"""Tiers of memory: one arena per tier, handed out in blocks of equal size, allocated once at start.

A block of the device tier is one exact page (64 tokens of K and V) or as many sealed pages as fit in it, so
short dense prompts and long compressed ones draw on the same bytes. A page is named by its *granule*: its
byte offset in the arena divided by ``GRANULE``. Every field of a page is then one strided view over all
granules, and a kernel needs a base pointer, a stride and a page table, whatever the page holds.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GRANULE = 256
"""Bytes between two addressable page starts; int32 page names reach 512 GiB per layer."""


SLAB = 2**30
"""Bytes of host memory that are pinned by one call; pinning takes about 0.34 s per GiB on an H200's host."""


class OutOfPages(RuntimeError):
    """A tier has fewer free blocks than were asked for."""


@dataclass(frozen=True)
class Field:
    """One array of a page, or of a sequence's state, in one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes, padded to 16 so that vector loads of the next field stay aligned."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // 16) * 16


def page_bytes(fields: Ids[Field]) -> int:
    """Bytes of a page that holds ``fields``, a multiple of the granule."""
    return -(-sum(field.nbytes for field in fields) // GRANULE) * GRANULE


class Tier:
    """One kind of memory: ``[num_layers, num_blocks, block_bytes]`` and the list of its free blocks.

    Args:
        device: where the arena's tensors can be used. For ``pinned`` memory, which is the host's, that is the GPU that
            reads and writes it across the bus.

    Attributes:
        arena: uint8 [num_layers, bytes].
        spare: granule of one more block that nobody ever owns: what has to be written somewhere goes there.
    """

    def __init__(
        self, name: str, num_layers: int, block_bytes: int, num_blocks: int, device: torch.device, pinned: bool = False
    ) -> None:
        self.name = name
        self.num_layers = num_layers
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.spare = num_blocks * block_bytes // GRANULE
        try:
            self.arena = _allocate((num_layers, (num_blocks + 1) * block_bytes), device, pinned)
        except (RuntimeError, MemoryError) as error:
            wanted = num_layers * num_blocks * block_bytes / 2**30
            raise MemoryError(
                f"cannot allocate {wanted:.1f} GiB for the {name} tier of the KV cache: {error}"
            ) from error
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Blocks not in use."""
        return len(self._free)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block over all layers."""
        return self.num_layers * self.block_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use over all layers."""
        return (self.num_blocks - len(self._free)) * self.bytes_per_block

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks and returns their granules; raises OutOfPages and takes none if there are fewer."""
        if count > len(self._free):
            raise OutOfPages(
                f"{count} blocks of the {self.name} tier wanted, {len(self._free)} of {self.num_blocks} free"
            )
        step = self.block_bytes // GRANULE
        return [self._free.pop() * step for _ in range(count)]

    def release(self, granules: Ids[int]) -> None:
        """Gives blocks back by the granules that ``allocate`` returned."""
        step = self.block_bytes // GRANULE
        self._free.extend(granule // step for granule in granules)

    def shuffle(self, seed: int) -> None:
        """Mixes the free blocks, as a day of sequences that come and go does."""
        random.Random(seed).shuffle(self._free)

    def views(self, fields: Ids[Field]) -> dict[str, Tensor]:
        """For each field the view ``[num_layers, granules, *shape]`` of pages that lay ``fields`` out in order."""
        views: dict[str, Tensor] = {}
        offset = 0
        for field in fields:
            views[field.name] = self._view(offset, field)
            offset += field.nbytes
        return views

    def _view(self, offset: int, field: Field) -> Tensor:
        if not self.block_bytes:
            return self.arena.new_empty(self.num_layers, 0, *field.shape, dtype=field.dtype)
        size, flat = field.dtype.itemsize, self.arena.view(field.dtype)
        strides = [math.prod(field.shape[axis + 1 :]) for axis in range(len(field.shape))]
        count = max(0, (self.arena.shape[1] - offset - math.prod(field.shape) * size) // GRANULE + 1)
        start = flat.storage_offset() + offset // size
        shape = (self.num_layers, count, *field.shape)
        return flat.as_strided(shape, (flat.stride(0), GRANULE // size, *strides), start)


def _allocate(shape: tuple[int, int], device: torch.device, pinned: bool) -> Tensor:
    """Zeroed bytes. Ordinary host memory comes from NumPy, whose zeros are committed only when first touched."""
    if pinned and 0 not in shape:
        return _pin(np.zeros(shape, np.uint8), device)
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


class _Mapped:
    """Pinned host memory as CUDA code sees it: under unified addressing the pointer is the same."""

    def __init__(self, array: np.ndarray) -> None:
        self.__cuda_array_interface__ = {
            "data": (array.ctypes.data, False), "shape": array.shape, "typestr": "|u1", "version": 3
        }  # fmt: skip
        self.array = array


def _pin(array: np.ndarray, device: torch.device) -> Tensor:
    """Pins ``array``, slab by slab, and returns it as a tensor of ``device``.

    Not through PyTorch's pinned allocator, which rounds sizes up to a power of two.
    """
    runtime = torch.cuda.cudart()
    starts = range(array.ctypes.data, array.ctypes.data + array.nbytes, SLAB)
    pinned: list[int] = []

    def unpin() -> None:
        for start in pinned:
            runtime.cudaHostUnregister(start)

    for start in starts:
        size = min(SLAB, array.ctypes.data + array.nbytes - start)
        status = int(runtime.cudaHostRegister(start, size, 0))
        if status:
            unpin()
            raise MemoryError(f"CUDA error {status} after pinning {len(pinned)} of {len(starts)} GiB of host memory")
        pinned.append(start)
    mapped = _Mapped(array)  # kept by the tensor's storage
    weakref.finalize(mapped, unpin)
    return torch.as_tensor(mapped, device=device)
