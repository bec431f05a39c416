"""Ranks that compute one model together, and their communication: sums over GPUs that address each other's memory in a
kernel of our own, the rest through NCCL, and gloo on CPUs."""

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
"""Backends for tensors of each device; the host's numbers go through gloo."""


class RankFailure(RuntimeError):
    """A rank has ended, or has failed in what all of them do together: none of them can go on."""


class Group:
    """The ranks of a model; a model on its own is a group of one, where everything is returned unchanged.

    All ranks call the same methods in the same order.

    Attributes:
        rank: this process's rank, from 0.
        size: number of ranks.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._peer_memory: PeerMemory | None = None

    def share_memory(self, device: torch.device) -> None:
        """Adds up through the memory of the ranks' GPUs from now on, where every rank can; logged where not. What each
        of them has found is agreed on before any waits for another: one that cannot go on keeps nobody waiting."""
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
            reason = "; ".join(reasons) or "another rank cannot"
            logger.warning("sums over ranks go through NCCL, which is slower for few tokens: %s", reason)

    def _all(self, holds: bool) -> bool:
        """Whether something holds on every rank."""
        return self.least({"holds": int(holds)})["holds"] == 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in place; its bits are the same on all of them."""
        if self._peer_memory is not None and self._peer_memory.takes(x):
            self._peer_memory.sum(x)
        elif self.size > 1:
            with _failing():
                torch.distributed.all_reduce(x)
        return x

    def join(self, x: Tensor) -> Tensor:
        """Every rank's ``x`` [n, k], side by side: [n, size * k]."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size, *x.shape)
        with _failing():
            torch.distributed.all_gather(list(parts.unbind()), x.contiguous())
        return parts.transpose(0, 1).flatten(1)

    def copy_first(self, x: Tensor) -> Tensor:
        """Copies rank 0's ``x`` into that of the others."""
        if self.size > 1:
            with _failing():
                torch.distributed.broadcast(x, 0)
        return x

    def agree(self, value: Value) -> Value:
        """Rank 0's value, which can be pickled."""
        if self.size == 1:
            return value
        values: list[Value] = [value]
        with _failing():
            torch.distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def least(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The smallest value of each count on any rank."""
        if self.size == 1:
            return dict(counts)
        names = sorted(counts)
        numbers = torch.tensor([counts[name] for name in names])
        with _failing():
            torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN)
        return dict(zip(names, numbers.tolist()))

    def abort(self) -> None:
        """Ends what waits for another rank on a GPU, in this process only. Returns once the CUDA graphs with
        collectives are gone: NCCL waits for that."""
        if self._peer_memory is not None:
            self._peer_memory.abort()
        if self.size > 1 and "nccl" in torch.distributed.get_backend_config():
            cast(torch.distributed.ProcessGroup, torch.distributed.group.WORLD).abort()

    def close(self) -> None:
        """Leaves the others, without waiting for them."""
        self.abort()  # NCCL's regular shutdown takes all ranks, and these may be gone
        torch.distributed.destroy_process_group()


ALONE = Group()


class _failing:
    """Turns errors of a collective, which say little and mean that a rank is gone, into ``RankFailure``."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
            raise RankFailure(f"a tensor-parallel rank does not answer: {error}") from error


def open_group(rank: int, size: int, device: torch.device, meeting: str) -> Group:
    """Waits for the other ranks of a host, which all name the same file, which must not exist yet.

    Raises ValueError where this process already is in a group.
    """
    check_alone()
    # The address within one host: a name that does not resolve, or resolves to another interface, does not matter.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        BACKENDS[device.type], init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    return Group(rank, size)


def check_alone() -> None:
    """Raises ValueError where this process already is in a group, of an engine or of the code that runs it."""
    if torch.distributed.is_initialized():
        raise ValueError(
            "this process has a torch.distributed group already, another tensor-parallel engine's for example: "
            "close that one first"
        )
