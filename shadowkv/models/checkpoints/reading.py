"""Reads weights ahead of their use: several threads read, and prepare, while the device is given what came before."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError
from shadowkv.models.checkpoints.stored_weight import Stored

AHEAD_BYTES = 2**28
"""Bytes of weights that are read, or being read, before they are used; a larger weight is alone."""

MAX_THREADS = 8
"""More would wait for the same disk, or the same memory."""


@dataclass(frozen=True)
class Reading:
    """A weight that can be read.

    Attributes:
        name: of the weight.
        nbytes: that it takes in its file.
        read: reads it; called on a thread.
    """

    name: str
    nbytes: int
    read: Callable[[], Stored]


def read_ahead(readings: Iterable[Reading]) -> Generator[tuple[str, Stored]]:
    """Name and weight of each, in order; raises what reading one raises, in its place."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    queue, waiting, taken = iter(readings), deque[tuple[Reading, Future[Stored]]](), 0
    upcoming = next(queue, None)
    with ThreadPoolExecutor(threads, "weights") as pool:
        try:
            while waiting or upcoming is not None:
                while upcoming is not None and (not waiting or taken + upcoming.nbytes <= AHEAD_BYTES):
                    waiting.append((upcoming, pool.submit(upcoming.read)))
                    taken += upcoming.nbytes
                    upcoming = next(queue, None)
                reading, future = waiting.popleft()
                yield reading.name, future.result()
                taken -= reading.nbytes
        finally:
            for _, future in waiting:
                future.cancel()


def read_bytes(file: Path, start: int, stop: int, *, pinned: bool = False) -> Tensor:
    """Bytes ``start`` to ``stop`` of a file: uint8 [stop - start], in pinned memory for a GPU.

    Raises ModelFileError where the file ends before.
    """
    data = torch.empty(stop - start, dtype=torch.uint8, pin_memory=pinned)
    view, done = data.numpy().data, 0
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while done < len(view):
            count = opened.readinto(view[done:])
            if not count:
                raise ModelFileError(file, f"it ends after {start + done} bytes, and tensors in it after {stop}")
            done += count
    return data
