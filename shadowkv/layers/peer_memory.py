"""``PeerMemory``: sums over the GPUs of one host in one kernel launch, through memory that all of them can address.
``Group`` uses it.

NCCL takes 13 us for the sum of one token's hidden states over two H200s, and every layer has two such sums. A kernel
that reads the other GPUs' memory takes half of this time. The memory is PyTorch's symmetric memory. The kernel is in
``csrc/kernels/all_reduce/``.
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
"""Number of thread blocks of the kernel, and maximum number of ranks that it supports."""

VECTOR_BYTES = 16
FLAG_BYTES = 4 * BLOCKS * MAX_RANKS
REGION_BYTES = 16 << 20
"""Maximum size of a tensor in bytes: 2,048 tokens with 4,096 16-bit numbers each. For larger tensors, NCCL is as fast
as the kernel. A rank's memory has two regions of this size."""


def one_shot_bytes(ranks: int) -> int:
    """Returns the size, in bytes, up to which a tensor is summed in one shot: each rank reads all numbers of the other
    ranks. Larger tensors take two shots: each rank sums a share of the numbers, then writes its sums to the other
    ranks. With two ranks, both methods transfer the same number of bytes, and one shot waits once instead of twice. For
    more ranks the limits are those of vLLM's custom all-reduce, which were not measured here."""
    return REGION_BYTES if ranks == 2 else 512 << 10 if ranks <= 4 else 256 << 10


def missing(ranks: int) -> list[str]:
    """Reasons why ``ranks`` GPUs of this host cannot sum tensors through peer memory; empty if they can."""
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
"""The symmetric memory of this process's first group; a later group gets none. PyTorch counts the exchanges of
addresses in a process, and ranks wait for ranks with the same count. In a second group, a process that was in the first
group and a new process would have different counts, and would wait for each other forever. The memory stays allocated
until the end of the process, because PyTorch aborts the process if it frees such memory after a CUDA error."""


def allocate(device: torch.device, ranks: int) -> tuple[Tensor | None, list[str]]:
    """Allocates this rank's symmetric memory for sums over ``ranks`` GPUs. Returns the memory as uint8, with all flags
    0, and no reasons. If that is impossible, returns None and the reasons."""
    if reasons := missing(ranks):
        return None, reasons
    if _allocated:
        return None, ["this process already has peer memory of another group of ranks"]
    # Without this, PyTorch makes NVLink multicast objects, which the kernel does not use and some hosts lack.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        own = symmetric_memory.empty(FLAG_BYTES + 2 * REGION_BYTES, dtype=torch.uint8, device=device)
        own[:FLAG_BYTES].zero_()
        torch.cuda.synchronize(device)  # flags must be 0 before another rank sets one
    except RuntimeError as error:
        return None, [str(error)]
    _allocated.append(own)
    return own, []


class PeerMemory:
    """This rank's symmetric memory, and the addresses of the other ranks' memory. All ranks must construct theirs at
    the same time.

    Args:
        own: the memory from ``allocate``.

    Raises RuntimeError if the ranks cannot share memory.
    """

    def __init__(self, own: Tensor, rank: int) -> None:
        self._rank = rank
        group = torch.distributed.group.WORLD
        assert group is not None
        with torch.cuda.device(own.device):  # pinned memory creates a context on the current device
            shared = symmetric_memory.rendezvous(own, group.group_name)
            self._buffers = torch.tensor(shared.buffer_ptrs, dtype=torch.int64)
            self._calls = torch.zeros(BLOCKS, dtype=torch.int32, device=own.device)
            self._aborted = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def takes(self, x: Tensor) -> bool:
        """Whether ``sum`` supports a tensor."""
        size = x.numel() * x.element_size()
        fits = 0 < size <= REGION_BYTES and size % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0
        return fits and x.dtype in DTYPES and x.is_contiguous()

    def sum(self, x: Tensor) -> None:
        """Replaces ``x`` by the sum over all ranks. Numbers are added in float32, in the order of the ranks, and then
        rounded."""
        two_shots = x.numel() * x.element_size() > one_shot_bytes(len(self._buffers))
        torch.ops.shadowkv_cuda.all_reduce(
            x, self._buffers, self._rank, REGION_BYTES, self._calls, self._aborted, two_shots
        )

    def abort(self) -> None:
        """Ends kernels that wait for another rank. Later kernels do not wait, either, and their sums are wrong."""
        self._aborted.fill_(1)
