"""Counts of open connections and of each API key's requests, over all processes that serve one socket."""

from __future__ import annotations

from mmap import mmap
from pathlib import Path


class Counts:
    """Open connections, and running requests of each API key.

    All processes share one table in memory, int64 [processes, 1 + keys]. Its first column counts connections; the
    others count the requests of one key each. Each process writes its own row and reads all rows. There is no lock,
    because a killed or stopped process could keep it. A request is counted before the limit is checked: if two
    concurrent requests reach the limit, both may be refused, but they never exceed the limit.

    Args:
        keys: number of API keys.
        file: the shared file, made by ``create``; None for a single process.
        row: this process's row.
    """

    def __init__(self, keys: int, file: Path | None = None, row: int = 0) -> None:
        self._width, self._row = 1 + keys, row
        if file is None:
            self._table = memoryview(bytearray(8 * self._width)).cast("q")
        else:
            with file.open("r+b") as opened:
                self._table = memoryview(mmap(opened.fileno(), 0)).cast("q")

    @staticmethod
    def create(file: Path, keys: int, processes: int) -> None:
        """Makes the shared file, with all counts zero."""
        file.write_bytes(bytes(8 * processes * (1 + keys)))

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self._table) // self._width

    @property
    def is_first(self) -> bool:
        """Whether this is the first process. It started the others, and does the work that must be done only once."""
        return self._row == 0

    @property
    def connections(self) -> int:
        """Open connections of all processes."""
        return self._total(0)

    @connections.setter
    def connections(self, of_this_process: int) -> None:
        self._table[self._row * self._width] = of_this_process

    def begin(self, key: int, limit: int) -> bool:
        """Counts a request of the API key with the index ``key``, unless that key already has ``limit`` requests; 0
        sets no limit. Returns whether the request was counted."""
        self._table[self._row * self._width + 1 + key] += 1
        if limit and self._total(1 + key) > limit:
            self.end(key)
            return False
        return True

    def end(self, key: int) -> None:
        """Subtracts a request of a key when the request has ended."""
        self._table[self._row * self._width + 1 + key] -= 1

    def clear(self, row: int) -> None:
        """Zeroes the counts of a process that has ended."""
        for column in range(self._width):
            self._table[row * self._width + column] = 0

    def _total(self, column: int) -> int:
        return sum(self._table[column :: self._width])
