"""Sums over the GPUs of one host in one launch, through memory that all of them address.

NCCL takes 13 us for the sum of one token's hidden states over two H200s, and every layer has two; a kernel that reads
the other GPUs' memory takes half of that. The memory is PyTorch's symmetric memory, ``csrc/kernels/all_reduce/`` the
kernel.
"""

from __future__ import annotations

import os

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from shadowkv.ops.extension import cuda_missing

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCKS, MAX_RANKS = 64, 8
"""Thread blocks of the kernel, and ranks that it adds up."""

VECTOR_BYTES = 16
FLAG_BYTES = 4 * BLOCKS * MAX_RANKS
REGION_BYTES = 16 << 20
"""Of the largest tensor: 2,048 tokens of 4,096 numbers of 16 bits. For more NCCL is as fast. A rank has two regions."""


def one_shot_bytes(ranks: int) -> int:
    """Up to how many bytes a rank reads all of the other ranks' numbers, beyond them a share of all: of two ranks both
    read as much, and one wait is less than two. For more as in vLLM's custom all-reduce, not measured here."""
    return REGION_BYTES if ranks == 2 else 512 << 10 if ranks <= 4 else 256 << 10


def missing(ranks: int) -> list[str]:
    """Why ``ranks`` GPUs of this host cannot add up their tensors through each other's memory; empty where they can."""
    if reasons := cuda_missing("all_reduce", "all_reduce"):
        return reasons
    if ranks > MAX_RANKS:
        return [f"there are {ranks} ranks, more than {MAX_RANKS}"]
    pairs = ((one, other) for one in range(ranks) for other in range(ranks) if one != other)
    return [
        f"GPU {one} cannot address memory of GPU {other}"
        for one, other in pairs
        if not torch.cuda.can_device_access_peer(one, other)
    ]


_allocated: list[Tensor] = []
"""This process's part, of the first group that had one. PyTorch counts the exchanges of addresses in a process, and new
processes of a second group would count otherwise: they would wait for one another. It stays to the end of the process,
because PyTorch ends the process where it frees such memory after an error of CUDA."""


def allocate(device: torch.device, ranks: int) -> tuple[Tensor | None, list[str]]:
    """This rank's part of the memory of so many GPUs, uint8, its flags 0; or None, and why."""
    if reasons := missing(ranks):
        return None, reasons
    if _allocated:
        return None, ["this process has had such memory already, in another group of ranks"]
    # Without it PyTorch makes objects of NVLink's multicast, which the kernel does not use and a host may not bear.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        own = symmetric_memory.empty(FLAG_BYTES + 2 * REGION_BYTES, dtype=torch.uint8, device=device)
        own[:FLAG_BYTES].zero_()
        torch.cuda.synchronize(device)  # before another rank raises a flag
    except RuntimeError as error:
        return None, [str(error)]
    _allocated.append(own)
    return own, []


class PeerMemory:
    """This rank's part of the memory, and the addresses of the others'. Every rank makes one at the same time.

    Args:
        own: what ``allocate`` has returned.

    Raises RuntimeError where the ranks cannot share it.
    """

    def __init__(self, own: Tensor, rank: int) -> None:
        self._rank = rank
        group = torch.distributed.group.WORLD
        assert group is not None
        with torch.cuda.device(own.device):  # pinned memory makes a context on the current one
            shared = symmetric_memory.rendezvous(own, group.group_name)
            self._buffers = torch.tensor(shared.buffer_ptrs, dtype=torch.int64)
            self._calls = torch.zeros(BLOCKS, dtype=torch.int32, device=own.device)
            self._aborted = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def takes(self, x: Tensor) -> bool:
        """Whether ``sum`` takes a tensor."""
        size = x.numel() * x.element_size()
        fits = 0 < size <= REGION_BYTES and size % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0
        return fits and x.dtype in DTYPES and x.is_contiguous()

    def sum(self, x: Tensor) -> None:
        """Replaces ``x`` by the sum of every rank's, added in float32 in the order of ranks and then rounded."""
        two_shots = x.numel() * x.element_size() > one_shot_bytes(len(self._buffers))
        torch.ops.shadowkv_cuda.all_reduce(
            x, self._buffers, self._rank, REGION_BYTES, self._calls, self._aborted, two_shots
        )

    def abort(self) -> None:
        """Ends what waits for another rank, now and later. Sums are wrong from here on."""
        self._aborted.fill_(1)
