"""Tiers of memory: arenas handed out in blocks of equal size, allocated once at start, counted by references.

A block of the device tier is one exact page (64 tokens of K and V) or as many compressed pages as fit in it, so
short dense prompts and long compressed ones draw on the same bytes. A page's id is its *granule*: its
byte offset in the arena divided by ``GRANULE``. Every field of a page is then one strided view over all
granules, and a kernel needs a base pointer, a stride and a page table, whatever the page holds. Blocks of the tier of
fitted states have their numbers as ids.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GRANULE = 256
"""Bytes between two addressable page starts; int32 page ids reach 512 GiB per layer."""


SLAB = 2**30
"""Bytes of host memory that are pinned by one call; pinning takes about 0.34 s per GiB on an H200's host."""


class OutOfBlocks(RuntimeError):
    """A tier has fewer free blocks than were asked for."""


class Blocks(dict[str, int]):
    """Numbers of blocks by tier; a tier that is not named has none: ``Blocks(device=3, host=2)``."""

    def __missing__(self, tier: str) -> int:
        return 0

    def __add__(self, other: Mapping[str, int]) -> Blocks:
        return Blocks({tier: self[tier] + other.get(tier, 0) for tier in {**self, **other}})

    def __sub__(self, other: Mapping[str, int]) -> Blocks:
        return Blocks({tier: self[tier] - other.get(tier, 0) for tier in {**self, **other}})

    def within(self, other: Blocks) -> bool:
        """Whether no number is above that of ``other``."""
        return all(count <= other[tier] for tier, count in self.items())

    def __str__(self) -> str:
        return ", ".join(f"{count} {tier}" for tier, count in self.items() if count) or "nothing"


@dataclass(frozen=True)
class Field:
    """One array of a page, or of a fitted state, in one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes, padded to 16 so that vector loads of the next field stay aligned."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // 16) * 16


def page_bytes(fields: Iterable[Field]) -> int:
    """Bytes of a page that holds ``fields``, a multiple of the granule."""
    return -(-sum(field.nbytes for field in fields) // GRANULE) * GRANULE


class BlockPool:
    """Which blocks are free, and how many references there are to each of the others.

    Args:
        step: page ids from one block to the next: a block's id is the first of its page ids.

    Attributes:
        spare: id of an extra block that is never allocated, the target of writes for padding rows.
        changes: how often blocks were taken or given back.
    """

    def __init__(self, name: str, num_blocks: int, step: int = 1) -> None:
        self.changes = 0
        self.name, self.num_blocks, self.step = name, num_blocks, step
        self.spare = num_blocks * step
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that are not held."""
        return len(self._free)

    def block_of(self, page_id: int) -> int:
        """The block that a page of that id lies in."""
        return page_id // self.step * self.step

    def blocks_of(self, page_ids: Iterable[int]) -> list[int]:
        """The blocks that pages of those ids lie in, each once."""
        return list(dict.fromkeys(map(self.block_of, page_ids)))

    def references(self, block: int) -> int:
        """References to ``block``."""
        return self._references[block // self.step]

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks, one reference each; raises OutOfBlocks and takes none if there are fewer."""
        if count > len(self._free):
            raise OutOfBlocks(
                f"{count} blocks of the {self.name} tier wanted, {len(self._free)} of {self.num_blocks} free"
            )
        self.changes += 1
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._references[number] = 1
        return [number * self.step for number in taken]

    def retain(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of ``blocks``, which must be held already."""
        self.changes += 1
        for block in blocks:
            assert self._references[block // self.step], f"block {block} of the {self.name} tier is held by no sequence"
            self._references[block // self.step] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives back a reference to each of ``blocks``; a block without references is free."""
        self.changes += 1
        for block in blocks:
            number = block // self.step
            self._references[number] -= 1
            assert self._references[number] >= 0, f"block {block} of the {self.name} tier was given back twice"
            if not self._references[number]:
                self._free.append(number)


class Tier(BlockPool):
    """One kind of memory: ``[num_layers, num_blocks, block_bytes]``.

    Args:
        device: where the arena's tensors can be used. For ``pinned`` memory, which is host memory, that is the GPU that
            reads and writes it across the bus.
        paged: whether blocks are divided into pages, so that page ids count granules; else they count blocks.

    Attributes:
        arena: uint8 [num_layers, bytes].
    """

    def __init__(
        self,
        name: str,
        num_layers: int,
        block_bytes: int,
        num_blocks: int,
        device: torch.device,
        pinned: bool = False,
        paged: bool = True,
    ) -> None:
        self.num_layers, self.block_bytes = num_layers, block_bytes
        self.bytes_per_block = num_layers * block_bytes
        try:
            self.arena = _allocate((num_layers, (num_blocks + 1) * block_bytes), device, pinned)
        except (RuntimeError, MemoryError) as error:
            gib = num_blocks * self.bytes_per_block / 2**30
            raise MemoryError(f"cannot allocate {gib:.1f} GiB for the {name} tier of the KV cache: {error}") from error
        super().__init__(name, num_blocks, block_bytes // GRANULE if paged and block_bytes else 1)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use over all layers."""
        return (self.num_blocks - self.free_blocks) * self.bytes_per_block

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks over all layers."""
        return self.num_blocks * self.bytes_per_block

    def views(self, fields: Sequence[Field]) -> dict[str, Tensor]:
        """For each field, the view ``[num_layers, page ids, *shape]`` of pages with ``fields`` laid out in order."""
        views: dict[str, Tensor] = {}
        offset, apart = 0, self.block_bytes // self.step
        for field in fields:
            views[field.name] = _view(self.arena, apart, offset, field)
            offset += field.nbytes
        return views


def _view(arena: Tensor, apart: int, offset: int, field: Field) -> Tensor:
    layers = arena.shape[0]
    if not arena.numel():
        return arena.new_empty(layers, 0, *field.shape, dtype=field.dtype)
    size, flat = field.dtype.itemsize, arena.view(field.dtype)
    strides = [math.prod(field.shape[axis + 1 :]) for axis in range(len(field.shape))]
    count = max(0, (arena.shape[1] - offset - math.prod(field.shape) * size) // apart + 1)
    start = flat.storage_offset() + offset // size
    return flat.as_strided((layers, count, *field.shape), (flat.stride(0), apart // size, *strides), start)


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
    """Pins ``array`` and returns it as a tensor of ``device``."""
    unpin = pin(array)
    mapped = _Mapped(array)  # kept by the tensor's storage
    weakref.finalize(mapped, unpin)
    return torch.as_tensor(mapped, device=device)


def pin(array: np.ndarray) -> Callable[[], None]:
    """Pins host memory for the current CUDA context, slab by slab; returns a function that undoes it.

    Not through PyTorch's pinned allocator, which rounds sizes up to a power of two. Raises MemoryError.
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
    return unpin
