"""Ranks of a model as threads of one process: what they exchange lies in a list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from shadowkv.layers.group import Group

Result = TypeVar("Result")


class ThreadGroup(Group):
    def __init__(self, rank: int, size: int, table: list[Tensor | None], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self._table, self._barrier = table, barrier

    def _all(self, x: Tensor) -> list[Tensor]:
        self._table[self.rank] = x.clone()
        self._barrier.wait()
        found = [one for one in self._table if one is not None]
        self._barrier.wait()
        return found

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(0))

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), 1)


def on_ranks(size: int, do: Callable[[Group], Result]) -> list[Result]:
    """What ``do`` gives on each of ``size`` ranks."""
    table, barrier = list[Tensor | None]([None] * size), threading.Barrier(size, timeout=300)

    def of_rank(rank: int) -> Result:
        try:
            return do(ThreadGroup(rank, size, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of_rank, range(size)))
