"""Statistics of the prefix cache's tiers. ``/metrics`` shows them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TierStats:
    """The use of a tier now, and its counts since the start. Counts that do not apply to a tier are 0.

    Attributes:
        used_bytes: bytes in use. On the device all sequences count, and on disk the files of all servers.
        total_bytes: size of the tier, or the limit on its use.
        hit_tokens: prompt tokens that were found in this tier and not computed.
        evictions: sequences, copies or files that were evicted to make room.
        copied_bytes: bytes of copies made in this tier.
        refused: copies that were not made in this tier for lack of room. On disk, a copy is also refused if too many
            are waiting, if it is too large, or after an error.
        restores, restored_bytes, restore_seconds: number, bytes and seconds of transfers from this tier to the next
            higher one. The seconds of a transfer count from its request to its end.
        corrupt: corrupt files, which were not served.
        write_errors, read_errors: files that could not be written or read.
        pinned_bytes: bytes of files that names keep.
        files: number of files of all servers.
        other_files: number of files that this server cannot use, because they are of another model, policy or number of
            ranks.
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
    other_files: int = 0
    misses: int = 0


class Counts:
    """A tier's counts since the start. Any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TierStats()

    def add(self, **more: float) -> None:
        """Adds to the named attributes of ``TierStats``."""
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in more.items()})

    def forget(self) -> None:
        """Sets all counts to 0."""
        with self._lock:
            self._stats = TierStats()

    def now(self, used_bytes: int, total_bytes: int, **use: int) -> TierStats:
        """The counts as ``TierStats``, with the given current use."""
        with self._lock:
            return replace(self._stats, used_bytes=used_bytes, total_bytes=total_bytes, **use)
