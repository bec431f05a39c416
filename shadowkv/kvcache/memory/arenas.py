"""Tiers: arenas of memory, allocated once at start and divided into blocks of equal size with reference counts.

A block of the device tier holds exact pages (64 tokens of K and V) or compressed pages. So short dense prompts and long
compressed ones share the same memory. The id of a page is its *granule*: its byte offset in the arena divided by
``GRANULE``. Every field of a page is then one strided view over all granules, and a kernel needs only a base pointer, a
stride and a page table, whatever the page holds. In the tier of fitted states, an id is the number of a block.
``SequencePool`` takes and frees blocks.
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
"""Bytes of a granule. Pages begin at multiples of a granule. int32 page ids reach 512 GiB per layer."""


SLAB = 2**30
"""Bytes of host memory that one call pins. Pinning takes about 0.34 s per GiB on an H200's host."""


class OutOfBlocks(RuntimeError):
    """A tier has fewer free blocks than requested."""


class Blocks(dict[str, int]):
    """Numbers of blocks by tier, as in ``Blocks(device=3, host=2)``. A missing tier has 0."""

    def __missing__(self, tier: str) -> int:
        return 0

    def __add__(self, other: Mapping[str, int]) -> Blocks:
        return Blocks({tier: self[tier] + other.get(tier, 0) for tier in {**self, **other}})

    def __sub__(self, other: Mapping[str, int]) -> Blocks:
        return Blocks({tier: self[tier] - other.get(tier, 0) for tier in {**self, **other}})

    def within(self, other: Blocks) -> bool:
        """Whether every number is at most the number of the same tier in ``other``."""
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
    """The free blocks of one kind, and the reference counts of all other blocks.

    Args:
        step: number of page ids per block. A block's id is its first page id.

    Attributes:
        spare: id of an extra block that is never allocated. Padding rows write to it.
        changes: number of calls that have changed reference counts.
    """

    def __init__(self, name: str, num_blocks: int, step: int = 1) -> None:
        self.changes = 0
        self.name, self.num_blocks, self.step = name, num_blocks, step
        self.spare = num_blocks * step
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def block_of(self, page_id: int) -> int:
        """Id of the block that contains a page."""
        return page_id // self.step * self.step

    def blocks_of(self, page_ids: Iterable[int]) -> list[int]:
        """Ids of the blocks that contain pages, each once."""
        return list(dict.fromkeys(map(self.block_of, page_ids)))

    def references(self, block: int) -> int:
        """Reference count of ``block``."""
        return self._references[block // self.step]

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks with one reference each, and returns their ids. Raises OutOfBlocks and then takes
        nothing."""
        if count > len(self._free):
            raise OutOfBlocks(
                f"{count} blocks of the {self.name} tier are needed, {len(self._free)} of {self.num_blocks} are free"
            )
        self.changes += 1
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._references[number] = 1
        return [number * self.step for number in taken]

    def retain(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of ``blocks``, which must have references already."""
        self.changes += 1
        for block in blocks:
            assert self._references[block // self.step], f"block {block} of the {self.name} tier is held by no sequence"
            self._references[block // self.step] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Removes a reference from each of ``blocks``. A block without references is free."""
        self.changes += 1
        for block in blocks:
            number = block // self.step
            self._references[number] -= 1
            assert self._references[number] >= 0, f"block {block} of the {self.name} tier was given back twice"
            if not self._references[number]:
                self._free.append(number)


class Tier(BlockPool):
    """The arena of one tier: ``[num_layers, num_blocks, block_bytes]``.

    Args:
        device: device of the arena's tensors. ``pinned`` memory is host memory that this GPU reads and writes across
            the bus.
        paged: whether blocks are divided into pages. Page ids then count granules; otherwise they count blocks.

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
        """A view ``[num_layers, page ids, *shape]`` of each field, for pages that hold ``fields`` in this order."""
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
    """Returns zeroed bytes. Ordinary host memory comes from NumPy, whose zeros take memory only when first touched."""
    if pinned and 0 not in shape:
        return pinned_for(device, np.zeros(shape, np.uint8))
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


class _Mapped:
    """Pinned host memory with CUDA's array interface. With unified addressing, the device uses the host's pointer."""

    def __init__(self, array: np.ndarray) -> None:
        self.__cuda_array_interface__ = {
            "data": (array.ctypes.data, False), "shape": array.shape, "typestr": "|u1", "version": 3
        }  # fmt: skip
        self.array = array


def pinned_for(device: torch.device, array: np.ndarray) -> Tensor:
    """Pins ``array``, uint8, and returns it as a tensor of ``device``, a GPU. The GPU reads and writes host memory
    through its address. Raises MemoryError if CUDA cannot pin the memory."""
    unpin = pin(array)
    mapped = _Mapped(array)  # the tensor's storage keeps a reference
    weakref.finalize(mapped, unpin)
    return torch.as_tensor(mapped, device=device)


def pin(array: np.ndarray) -> Callable[[], None]:
    """Pins host memory for the current CUDA context, slab by slab. Returns a function that unpins it.

    PyTorch's pinned allocator is not used, because it rounds sizes up to a power of two. Raises MemoryError if CUDA
    cannot pin the memory.
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
