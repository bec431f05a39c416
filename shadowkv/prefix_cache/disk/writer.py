"""``Writer``: writes snapshots on one thread, and evicts files to stay within a limit. ``DiskTier`` uses it."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress

from shadowkv.prefix_cache.disk.directory import Directory
from shadowkv.prefix_cache.disk.files import Buffer, SnapshotGone, write_snapshot
from shadowkv.prefix_cache.disk.filesystem import Workers
from shadowkv.prefix_cache.disk.header import FileHeader, file_name
from shadowkv.prefix_cache.disk.names import Save
from shadowkv.prefix_cache.page_hashes import TokenIds

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 600.0

EVICTION_ROUNDS = 3
"""Maximum number of passes over all files in one eviction. A file that another server has used meanwhile is kept, and
counts as newer in the next pass."""

CLOCK_SECONDS = 0.001
"""A file system may round the time that is set for a file. Both times differ by at most this number of seconds."""

GIVING_UP_SECONDS = 1.0
"""Seconds in which a stopped writer can remove its unfinished file."""


class Writer:
    """Writes and evicts snapshots of a disk tier. It never evicts snapshots that names keep.

    Args:
        complete: returns whether all files of the directory are known. Until then none is evicted.
        limit_bytes: maximum number of bytes of all files.
        queue_bytes: maximum number of bytes of snapshots that wait to be written. One snapshot may always wait.
        pause_seconds: seconds without writes after a failed write. The number doubles after each further failure.
    """

    def __init__(
        self,
        directory: Directory,
        complete: Callable[[], bool],
        *,
        limit_bytes: int,
        queue_bytes: int,
        pause_seconds: float,
    ) -> None:
        self._directory, self._complete = directory, complete
        self._limit_bytes, self._queue_bytes, self._pause_seconds = limit_bytes, queue_bytes, pause_seconds
        self._names, self._counts = directory.names, directory.counts
        self._lock = threading.Lock()
        self._waiting: dict[str, int] = {}
        self._paused_until, self._pause, self._reason = 0.0, pause_seconds, ""
        self._give_up = threading.Event()
        self._thread = Workers(1, "cache-write")

    def put(self, header: FileHeader, token_ids: TokenIds, slabs: Iterable[Buffer]) -> Future[bool]:
        """Queues a snapshot. The future's result says whether the snapshot is on the disk. Ids and slabs may be changed
        once the future is done."""
        size = header.nbytes
        with self._lock:
            full = bool(self._waiting) and sum(self._waiting.values()) + size > self._queue_bytes
            refused = full or header.name in self._waiting or time.monotonic() < self._paused_until
            if not refused:
                self._waiting[header.name] = size
        if refused:
            return self._refused()
        future = self._thread.submit(self._write, header, token_ids, slabs)
        future.add_done_callback(lambda _: self._done(header.name))
        return future

    @property
    def problem(self) -> str | None:
        """Why writing is paused after a failure, and for how long; None if it is not paused. Does not wait for the
        disk."""
        left = self._paused_until - time.monotonic()
        return f"{self._reason}; it is tried again in {left:.0f} s" if left > 0 else None

    def keep(self, name: str, save: Save) -> Future[None]:
        """Queues a name for snapshots on the disk. The future raises SnapshotGone if one is missing, and OSError if the
        name cannot be written."""
        return self._thread.submit(self._keep, name, save)

    def _keep(self, name: str, save: Save) -> None:
        # This server evicts files only on this thread, so it evicts none meanwhile. But another server may evict a
        # snapshot before it sees the name. So the files are checked before and after the name is written.
        self._check_there(save)
        self._names.write(name, save)
        # A server that does not know the name yet sees the new times of use, and does not evict files used since it
        # looked.
        for snapshot in save.snapshots:
            self._directory.touch(snapshot)
        self._check_there(save)
        with suppress(OSError):  # the name is saved; only ``pinned_bytes`` is updated later
            self._names.refresh()

    def _check_there(self, save: Save) -> None:
        for snapshot in save.snapshots:
            path = self._directory.path / file_name(snapshot)
            try:
                self._directory.files.stat(path)
            except FileNotFoundError:
                self._directory.lost(snapshot)
                raise SnapshotGone(f"{path} is not there any more") from None

    def _done(self, name: str) -> None:
        with self._lock:
            del self._waiting[name]

    def _refused(self) -> Future[bool]:
        self._counts.add(refused=1)
        refused: Future[bool] = Future()
        refused.set_result(False)
        return refused

    def close(self, timeout: float) -> bool:
        """Writes queued snapshots within ``timeout`` seconds, then stops. Returns whether all were written."""
        if self._thread.close(timeout, drain=True):
            return True
        self._give_up.set()
        self._thread.close(GIVING_UP_SECONDS)
        return False

    def _write(self, header: FileHeader, token_ids: TokenIds, slabs: Iterable[Buffer]) -> bool:
        if self._stays(header.name):
            return False
        ancestors = self._ancestors(header)
        if ancestors is None or not self._directory.fits(header) or time.monotonic() < self._paused_until:
            return self._refused().result()
        try:
            written = self._make_room(header.file_bytes, ancestors) and self._attempt(
                header, token_ids, slabs, ancestors
            )
        except InterruptedError:
            return False
        except OSError as error:
            self._failed(error)
            return False
        except (ValueError, RuntimeError, MemoryError):
            self._counts.add(write_errors=1)
            logger.exception("%s is not stored", header.name)
            return False
        if written is False:
            return self._refused().result()
        self._pause = self._pause_seconds
        if written is None:
            return False
        self._directory.stored(written)
        return True

    def _attempt(
        self, header: FileHeader, token_ids: TokenIds, slabs: Iterable[Buffer], keep: set[str]
    ) -> FileHeader | None:
        """Writes a file. If the disk is full and the data can be iterated again, it evicts files and tries once
        more."""
        begun = False

        def go_on() -> bool:
            nonlocal begun
            begun = True
            return not self._give_up.is_set()

        def attempt() -> FileHeader | None:
            return write_snapshot(
                self._directory.path,
                header,
                token_ids,
                slabs,
                replace_existing=lambda: not self._stays(header.name),
                go_on=go_on,
                files=self._directory.files,
            )

        try:
            return attempt()
        except OSError as error:
            again = not begun or iter(slabs) is not slabs
            if error.errno != errno.ENOSPC or not again or not self._evict(header.file_bytes, keep):
                raise
        return attempt()

    def _stays(self, name: str) -> bool:
        """Whether a usable file has this name."""
        header = self._header(name)
        return header is not None and self._directory.fits(header)

    def _header(self, name: str) -> FileHeader | None:
        """The header of a file, read from the disk if the directory does not know it yet."""
        return self._directory.get(name) or self._directory.look(name)

    def _ancestors(self, header: FileHeader) -> set[str] | None:
        """Names of a snapshot's ancestors; None if one is missing, which makes the snapshot unusable."""
        names: set[str] = set()
        name = header.parent
        while name:
            ancestor = self._header(name)
            if ancestor is None or name in names:
                return None
            names.add(name)
            name = ancestor.parent
        return names

    def _failed(self, error: OSError) -> None:
        self._counts.add(write_errors=1)
        self._reason = error.strerror or str(error)
        logger.warning(
            "%s cannot be written to: %s; nothing is stored there for %g s, and requests continue without it",
            self._directory.path,
            self._reason,
            self._pause,
        )
        self._paused_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _make_room(self, size: int, keep: set[str]) -> bool:
        """Evicts files until ``size`` more bytes are within the limit. Returns whether there is room then."""
        limit = self._limit_bytes
        over = self._directory.bytes + size - limit
        if over <= 0 or (size <= limit and not self._complete()):
            return True
        kept = self._directory.size(keep | self._names.refresh())
        return size + kept <= limit and self._evict(over, keep) >= over

    def _evict(self, size: int, keep: set[str]) -> int:
        """Evicts files until at least ``size`` bytes are freed, if there are enough. Returns the freed bytes."""
        freed = 0
        for _ in range(EVICTION_ROUNDS if self._complete() else 0):
            for header, used in self._directory.by_age(keep | self._names.refresh()):
                if freed >= size:
                    return freed
                freed += self._remove(header, used)
        return freed

    def _remove(self, header: FileHeader, used: float) -> int:
        """Removes a file, unless another server has used it since ``used``. Returns the number of freed bytes."""
        with suppress(FileNotFoundError):  # another server removed it first
            changed = self._directory.files.stat(self._directory.path / header.file_name).st_mtime
            if changed > used + CLOCK_SECONDS:
                self._directory.use(header.name, changed)
                return 0
        self._directory.evict(header)
        return header.file_bytes
