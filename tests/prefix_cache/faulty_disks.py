"""Disks that are slow, full or read-only."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from shadowkv.prefix_cache.disk.filesystem import FileSystem

HELD_SECONDS = 240.0
"""Most that a held disk waits: by half of it whoever is not to wait for the disk has gone on, on any machine."""


def failure(number: int) -> OSError:
    """What the system says."""
    return OSError(number, os.strerror(number))


class SlowDisk(FileSystem):
    """Every call takes a while."""

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
    """Listings, openings, reads and writes, those named, wait until they may go on."""

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
    """Has room for so many bytes in a directory; if ``late`` it reserves nothing, and is found full in a write."""

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
    """Nothing can be written, removed or touched."""

    def __init__(self, number: int = errno.EROFS) -> None:
        self.number = number

    def create(self, path: Path) -> int:
        raise failure(self.number)

    def remove(self, path: Path) -> None:
        raise failure(self.number)

    def touch(self, path: Path, seconds: float) -> None:
        raise failure(self.number)


class BrokenDisk(FileSystem):
    """Its data cannot be read."""

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if offset > 4096:
            raise failure(errno.EIO)
        return super().read(descriptor, buffer, offset)
