"""What is open at once, counted over all processes that serve clients on one socket."""

from __future__ import annotations

from mmap import mmap
from pathlib import Path


class Counts:
    """Open connections, and requests of each API key.

    Each process writes a row of its own in memory that all share, int64 [processes, 1 + keys], connections first, and
    reads all rows. There is no lock, which a process that is killed or stopped could keep: a request is counted before
    the limit is looked at, so that of two at once neither may get in, and never both.

    Args:
        keys: number of API keys.
        file: what they share, as ``create`` makes it; None for one process.
        row: this process's.
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
        """Makes the file that processes share, with nothing open."""
        file.write_bytes(bytes(8 * processes * (1 + keys)))

    @property
    def processes(self) -> int:
        """How many there are."""
        return len(self._table) // self._width

    @property
    def is_first(self) -> bool:
        """Whether this is the process that started the others, and does what is to be done once."""
        return self._row == 0

    @property
    def connections(self) -> int:
        """Open connections of all processes."""
        return self._total(0)

    @connections.setter
    def connections(self, of_this_process: int) -> None:
        self._table[self._row * self._width] = of_this_process

    def begin(self, key: int, limit: int) -> bool:
        """Counts a request of a key, unless there are ``limit`` already; 0: any number. Returns whether it did."""
        self._table[self._row * self._width + 1 + key] += 1
        if limit and self._total(1 + key) > limit:
            self.end(key)
            return False
        return True

    def end(self, key: int) -> None:
        """Takes a request off again."""
        self._table[self._row * self._width + 1 + key] -= 1

    def clear(self, row: int) -> None:
        """Nothing is open in a process that has ended."""
        for column in range(self._width):
            self._table[row * self._width + column] = 0

    def _total(self, column: int) -> int:
        return sum(self._table[column :: self._width])
