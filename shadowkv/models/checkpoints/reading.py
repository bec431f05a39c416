"""Reads weights ahead of their use: threads read and prepare weights while earlier ones are copied to the device."""

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
"""Maximum bytes of weights that are read, or being read, before their use; a larger weight is read alone."""

MAX_THREADS = 8
"""Maximum number of reading threads; more would wait for the same disk or the same memory."""


@dataclass(frozen=True)
class Reading:
    """A weight to read.

    Attributes:
        name: the weight's name.
        nbytes: its bytes in the file.
        read: function that reads the weight; it is called on a reading thread.
    """

    name: str
    nbytes: int
    read: Callable[[], Stored]


def read_ahead(readings: Iterable[Reading]) -> Generator[tuple[str, Stored]]:
    """Yields names and weights in the order of ``readings``. If a weight cannot be read, the error is raised at the
    weight's turn."""
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
    """Reads bytes ``start`` to ``stop`` of a file: uint8 [stop - start]. ``pinned`` puts them in pinned memory, from
    which copies to a GPU are faster.

    Raises ModelFileError if the file is shorter.
    """
    data = torch.empty(stop - start, dtype=torch.uint8, pin_memory=pinned)
    view, done = data.numpy().data, 0
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while done < len(view):
            count = opened.readinto(view[done:])
            if not count:
                raise ModelFileError(file, f"it ends after {start + done} bytes, but its tensors end at {stop}")
            done += count
    return data
