"""What the tiers of the prefix cache have done so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class DiskStats:
    """Counts since the start, and what is there now.

    Attributes:
        bytes: of all files in the directory now, including other writers'.
        files: their number.
        pinned_bytes: bytes of those that names keep.
        hits: snapshots that were read.
        misses: reads that failed.
        evictions: files removed to make room for others.
        corrupt: files that were not what was written, and were not served.
        writes: files written.
        written_bytes: their sizes.
        refused: snapshots that were not written because too many were waiting, after an error, or for their size.
        write_errors: files that could not be written.
        read_errors: files that could not be read.
        restored_bytes: bytes of snapshots that were read.
        restore_seconds: from request to completion, summed over ``hits``.
    """

    bytes: int = 0
    files: int = 0
    pinned_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    corrupt: int = 0
    writes: int = 0
    written_bytes: int = 0
    refused: int = 0
    write_errors: int = 0
    read_errors: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0


class Counts:
    """Counts that several threads increment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = DiskStats()

    def add(self, **more: float) -> None:
        """Adds to the named attributes of the statistics."""
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in more.items()})

    def now(self, bytes: int, files: int, pinned_bytes: int) -> DiskStats:
        """The statistics, with what is there now."""
        with self._lock:
            return replace(self._stats, bytes=bytes, files=files, pinned_bytes=pinned_bytes)


@dataclass(frozen=True)
class TierStats:
    """A tier as it is now, and what it has done since the start; counts that do not apply to a tier stay 0.

    Attributes:
        used_bytes: on the device of all sequences, including running ones; on disk of all files, whoever wrote them.
        total_bytes: its size, or the limit on its use.
        hit_tokens: prompt tokens that were found there, and so not computed.
        evictions: of kept sequences, copies or files, to make room for others.
        copied_bytes: of copies made there.
        refused: copies that were not made there for lack of room, on the disk also after an error.
        restores, restored_bytes, restore_seconds: from there to the next tier above.
        corrupt: files that were not what was written, and were not served.
        write_errors, read_errors: files that could not be written or read.
        pinned_bytes: of files that names keep.
    """

    used_bytes: int
    total_bytes: int
    hit_tokens: int = 0
    evictions: int = 0
    copied_bytes: int = 0
    refused: int = 0
    restores: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    corrupt: int = 0
    write_errors: int = 0
    read_errors: int = 0
    pinned_bytes: int = 0


@dataclass
class TierCounts:
    """What the engine's thread counts, from the start; others may read it.

    Attributes:
        hit_tokens: prompt tokens that were not computed, by the tier where they were found.
        copied_bytes: from the device to host memory.
        restored_bytes, restore_seconds, restores: from host memory to the device.
        device_evictions: kept sequences evicted to make room for others.
        host_evictions: snapshots evicted from host memory to make room for others.
        refused: nodes that were not copied, for lack of room.
    """

    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    copied_bytes: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    restores: int = 0
    device_evictions: int = 0
    host_evictions: int = 0
    refused: int = 0

    def forget(self) -> None:
        """Restarts the counts."""
        vars(self).update(vars(TierCounts()))

    def restored(self, nbytes: int, seconds: float) -> None:
        """Counts a chain that has arrived."""
        self.restores += 1
        self.restored_bytes += nbytes
        self.restore_seconds += seconds
