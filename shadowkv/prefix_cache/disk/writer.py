"""Writes snapshots on one thread, within a limit of bytes: callers never wait."""

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
from shadowkv.prefix_cache.page_names import TokenIds

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 600.0

EVICTION_ROUNDS = 3
"""Passes over all files: those that another server turns out to have used are newer in the next one."""

CLOCK_SECONDS = 0.001
"""Largest difference between a time on the disk and the one it was set to, in seconds."""

GIVING_UP_SECONDS = 1.0
"""Time for a writer that has been told to give up to remove its unfinished file."""


class Writer:
    """The writing half of a disk tier, which removes nothing that names keep.

    Args:
        complete: says whether the directory's files are all known, before which none is removed to make room.
        limit_bytes: of all files.
        queue_bytes: of snapshots waiting to be written; one may always wait.
        pause_seconds: without writes after a failed one, doubled after each further failure.
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
        """Queues a snapshot; the future says whether it is on the disk, after which data and ids may be reused."""
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
        """Why nothing is written at present, after a failure, and for how long; does not wait."""
        left = self._paused_until - time.monotonic()
        return f"{self._reason}; it is tried again in {left:.0f} s" if left > 0 else None

    def keep(self, name: str, save: Save) -> Future[None]:
        """Queues a name for what is on the disk; the future raises SnapshotGone where part of it is missing, OSError
        where the name cannot be written."""
        return self._thread.submit(self._keep, name, save)

    def _keep(self, name: str, save: Save) -> None:
        # Nothing is evicted on this thread meanwhile; another server may have evicted before it saw the name.
        self._check_there(save)
        self._names.write(name, save)
        for snapshot in save.snapshots:  # a server that is evicting and has not seen the name sees that they are used
            self._directory.touch(snapshot)
        self._check_there(save)
        with suppress(OSError):  # it is saved; only the size of what names keep is known a little later
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
        """Writes what is queued, within ``timeout`` seconds, and stops; returns whether all was written."""
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
        """Writes a file; if the disk is full and the data can be iterated again, evicts others and tries once more."""
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
        """Whether a file of this name is there and usable."""
        header = self._header(name)
        return header is not None and self._directory.fits(header)

    def _header(self, name: str) -> FileHeader | None:
        """The header of a file, which the directory may not know yet."""
        return self._directory.get(name) or self._directory.look(name)

    def _ancestors(self, header: FileHeader) -> set[str] | None:
        """Names of all that a snapshot continues; None if one of them is missing, as it could not be read then."""
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
            "%s cannot be written to: %s; nothing is stored there for %g s, and requests go on without",
            self._directory.path,
            self._reason,
            self._pause,
        )
        self._paused_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _make_room(self, size: int, keep: set[str]) -> bool:
        """Evicts until ``size`` more bytes are within the limit; returns whether there is room then."""
        limit = self._limit_bytes
        over = self._directory.bytes + size - limit
        if over <= 0 or (size <= limit and not self._complete()):
            return True
        kept = self._directory.size(keep | self._names.refresh())
        return size + kept <= limit and self._evict(over, keep) >= over

    def _evict(self, size: int, keep: set[str]) -> int:
        """Evicts files of ``size`` bytes or slightly more, if there are enough; returns the number of bytes."""
        freed = 0
        for _ in range(EVICTION_ROUNDS if self._complete() else 0):
            for header, used in self._directory.by_age(keep | self._names.refresh()):
                if freed >= size:
                    return freed
                freed += self._remove(header, used)
        return freed

    def _remove(self, header: FileHeader, used: float) -> int:
        """Removes a file last ``used`` then, unless another server has used it since; returns how many bytes that
        frees."""
        with suppress(FileNotFoundError):  # another server removed it first
            changed = self._directory.files.stat(self._directory.path / header.file_name).st_mtime
            if changed > used + CLOCK_SECONDS:
                self._directory.use(header.name, changed)
                return 0
        self._directory.evict(header)
        return header.file_bytes
