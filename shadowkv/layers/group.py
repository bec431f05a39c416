"""``Group``: the ranks of one model and their collectives. Layers and the engine call it.

Sums over GPUs that can address each other's memory use a kernel of this project. Other collectives use NCCL for tensors
on GPUs, and gloo for tensors on the host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TypeVar, cast

import torch
import torch.distributed
from torch import Tensor

from shadowkv.layers.peer_memory import PeerMemory, allocate

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of torch.distributed by device type. Tensors on the host always use gloo."""


class RankFailure(RuntimeError):
    """A rank has ended, or a collective has failed: no rank can go on."""


class Group:
    """The ranks of a model. In a group of one rank, collectives return their arguments unchanged.

    All ranks must call the same methods in the same order.

    Attributes:
        rank: this process's rank, from 0.
        size: number of ranks.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._peer_memory: PeerMemory | None = None

    def share_memory(self, device: torch.device) -> None:
        """From now on, sums use peer memory if every rank supports it. Otherwise the reason is logged.

        First, every rank tells the others whether it supports peer memory. Otherwise, a rank that does could wait
        forever for one that does not.
        """
        if self.size == 1 or device.type != "cuda":
            return
        own, reasons = allocate(device, self.size)
        memory = None
        if self._all(own is not None) and own is not None:
            try:
                memory = PeerMemory(own, self.rank)
            except RuntimeError as error:
                reasons = [str(error)]
            if self._all(memory is not None):
                self._peer_memory = memory
        if self._peer_memory is None:
            reason = "; ".join(reasons) or "another rank cannot use peer memory"
            logger.warning("sums over ranks go through NCCL, which is slower for few tokens: %s", reason)

    def _all(self, holds: bool) -> bool:
        """Whether ``holds`` is True on every rank."""
        return self.least({"holds": int(holds)})["holds"] == 1

    def sum(self, x: Tensor) -> Tensor:
        """Replaces ``x`` by the sum over all ranks. The result is bitwise the same on all ranks."""
        if self._peer_memory is not None and self._peer_memory.takes(x):
            self._peer_memory.sum(x)
        elif self.size > 1:
            with _failing():
                torch.distributed.all_reduce(x)
        return x

    def join(self, x: Tensor) -> Tensor:
        """Concatenates every rank's ``x`` [n, k] along columns: [n, size * k]."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size, *x.shape)
        with _failing():
            torch.distributed.all_gather(list(parts.unbind()), x.contiguous())
        return parts.transpose(0, 1).flatten(1)

    def copy_first(self, x: Tensor) -> Tensor:
        """Copies rank 0's ``x`` into the other ranks' ``x``."""
        if self.size > 1:
            with _failing():
                torch.distributed.broadcast(x, 0)
        return x

    def agree(self, value: Value) -> Value:
        """Returns rank 0's value on all ranks. The value must be picklable."""
        if self.size == 1:
            return value
        values: list[Value] = [value]
        with _failing():
            torch.distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in the order of the ranks, on every rank. Values must be picklable."""
        if self.size == 1:
            return [value]
        values: list[Value] = [value] * self.size
        for rank in range(self.size):
            own = [value]
            with _failing():
                torch.distributed.broadcast_object_list(own, rank, device=torch.device("cpu"))
            values[rank] = own[0]
        return values

    def least(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Returns the minimum of each count over all ranks."""
        if self.size == 1:
            return dict(counts)
        names = sorted(counts)
        numbers = torch.tensor([counts[name] for name in names])
        with _failing():
            torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN)
        return dict(zip(names, numbers.tolist()))

    def abort(self) -> None:
        """Ends kernels of this process that wait for another rank. The call returns only after all CUDA graphs with
        collectives are freed, because NCCL waits until they are."""
        if self._peer_memory is not None:
            self._peer_memory.abort()
        if self.size > 1 and "nccl" in torch.distributed.get_backend_config():
            cast(torch.distributed.ProcessGroup, torch.distributed.group.WORLD).abort()

    def close(self) -> None:
        """Leaves the group, without waiting for other ranks."""
        self.abort()  # NCCL's regular shutdown needs all ranks, but some may have ended
        torch.distributed.destroy_process_group()


ALONE = Group()


class _failing:
    """A context manager that turns an error of a collective into ``RankFailure``. Such an error means that a rank has
    ended."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
            raise RankFailure(f"a tensor-parallel rank does not answer: {error}") from error


def open_group(rank: int, size: int, device: torch.device, meeting: str) -> Group:
    """Joins the process group of one host, and waits for the other ranks.

    ``meeting`` is the path of a file, the same for all ranks. The file must not exist before the first rank joins.
    Raises ValueError if this process is already in a group.
    """
    check_alone()
    # The loopback interface works even if the host's name does not resolve, or resolves to another interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        BACKENDS[device.type], init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    return Group(rank, size)


def check_alone() -> None:
    """Raises ValueError if this process is already in a torch.distributed group, of an engine or of other code."""
    if torch.distributed.is_initialized():
        raise ValueError(
            "this process already has a torch.distributed group, for example of another tensor-parallel engine: close "
            "it first"
        )
