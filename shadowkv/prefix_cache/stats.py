"""What the tiers of the prefix cache have done so far, as ``/metrics`` shows it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TierStats:
    """A tier as it is now, and what it has done since the start; counts that do not apply to a tier stay 0.

    Attributes:
        used_bytes: on the device of all sequences, including running ones; on disk of all files, whoever wrote them.
        total_bytes: its size, or the limit on its use.
        hit_tokens: prompt tokens that were found there, and so not computed.
        evictions: of kept sequences, copies or files, to make room for others.
        copied_bytes: of copies made there.
        refused: copies that were not made there: for lack of room; on the disk also because too many were waiting, for
            their size, or after an error.
        restores, restored_bytes, restore_seconds: from there to the next tier above; seconds from request to end.
        corrupt: files that were not what was written, and were not served.
        write_errors, read_errors: files that could not be written or read.
        pinned_bytes: of files that names keep.
        files: their number, whoever wrote them.
        misses: reads that failed.
    """

    used_bytes: int = 0
    total_bytes: int = 0
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
    files: int = 0
    misses: int = 0


class Counts:
    """What a tier has done so far; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TierStats()

    def add(self, **more: float) -> None:
        """Adds to the named attributes of the statistics."""
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in more.items()})

    def forget(self) -> None:
        """Restarts the counts."""
        with self._lock:
            self._stats = TierStats()

    def now(self, used_bytes: int, total_bytes: int, pinned_bytes: int = 0, files: int = 0) -> TierStats:
        """The statistics, with what is there now."""
        with self._lock:
            return replace(
                self._stats, used_bytes=used_bytes, total_bytes=total_bytes, pinned_bytes=pinned_bytes, files=files
            )
