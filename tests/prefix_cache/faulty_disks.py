"""Disks that are slow, full or read-only."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from shadowkv.prefix_cache.disk.filesystem import FileSystem

HELD_SECONDS = 240.0
"""Most seconds that a held disk waits. A caller that must not wait for the disk has gone on after half of it, on any
machine."""


def failure(number: int) -> OSError:
    """The system's error with this number."""
    return OSError(number, os.strerror(number))


class SlowDisk(FileSystem):
    """Every call takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def names(self, directory: Path) -> list[str]:
        time.sleep(self.seconds)
        return super().names(directory)

    def open(self, path: Path) -> int:
        time.sleep(self.seconds)
        return super().open(path)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        time.sleep(self.seconds)
        return super().read(descriptor, buffer, offset)

    def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
        time.sleep(self.seconds)
        return super().write(descriptor, data, offset)


class HeldDisk(FileSystem):
    """The calls in ``held``, of ``names``, ``open``, ``read`` and ``write``, wait for ``go_on``."""

    def __init__(self, *held: str) -> None:
        self.held, self.go_on, self.reached = held, threading.Event(), threading.Event()

    def _wait(self, call: str) -> None:
        if call in self.held:
            self.reached.set()
            assert self.go_on.wait(HELD_SECONDS)

    def names(self, directory: Path) -> list[str]:
        self._wait("names")
        return super().names(directory)

    def open(self, path: Path) -> int:
        self._wait("open")
        return super().open(path)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._wait("read")
        return super().read(descriptor, buffer, offset)

    def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
        self._wait("write")
        return super().write(descriptor, data, offset)


class FullDisk(FileSystem):
    """A disk with ``room`` bytes for a directory. If ``late``, only writes fail, not reservations."""

    def __init__(self, directory: Path, room: int, late: bool = False) -> None:
        self.directory, self.room, self.late = directory, room, late

    def _check(self, more: int) -> None:
        if sum(path.stat().st_size for path in self.directory.iterdir()) + more > self.room:
            raise failure(errno.ENOSPC)

    def reserve(self, descriptor: int, size: int) -> None:
        if not self.late:
            self._check(size)

    def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
        self._check(max(0, offset + len(data) - os.fstat(descriptor).st_size))
        return super().write(descriptor, data, offset)


class ReadOnlyDisk(FileSystem):
    """No file can be created, removed or touched."""

    def __init__(self, number: int = errno.EROFS) -> None:
        self.number = number

    def create(self, path: Path) -> int:
        raise failure(self.number)

    def remove(self, path: Path) -> None:
        raise failure(self.number)

    def touch(self, path: Path, seconds: float) -> None:
        raise failure(self.number)


class BrokenDisk(FileSystem):
    """Headers can be read, data cannot."""

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if offset > 4096:
            raise failure(errno.EIO)
        return super().read(descriptor, buffer, offset)
