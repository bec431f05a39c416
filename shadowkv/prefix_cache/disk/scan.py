"""Finds out what is in a directory, at the start and as other servers change it, on a separate thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shadowkv.prefix_cache.disk.files import TEMPORARY, read_head
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.head import BadSnapshot, file_name
from shadowkv.prefix_cache.disk.index import Entry
from shadowkv.prefix_cache.disk.names import Names
from shadowkv.prefix_cache.protocol import is_snapshot_name

logger = logging.getLogger(__name__)

TEMPORARY_SECONDS = 3600.0
"""Age from which a temporary file is abandoned: one that is being written is as old as its last write."""

SUFFIX = file_name("")


def snapshot_names(directory: Path, files: FileSystem) -> set[str]:
    """Names of the files in a directory that are snapshots by their name; raises OSError."""
    names = (name.removesuffix(SUFFIX) for name in files.names(directory) if name.endswith(SUFFIX))
    return {name for name in names if is_snapshot_name(name)}


def remove_leftovers(directory: Path, files: FileSystem, older_than: float = TEMPORARY_SECONDS) -> int:
    """Removes what killed writers have left behind; returns the number of files. Raises OSError."""
    count = 0
    for name in files.names(directory):
        if name.startswith(TEMPORARY):
            try:
                if time.time() - files.stat(directory / name).st_mtime > older_than:
                    files.remove(directory / name)
                    count += 1
            except FileNotFoundError:
                pass  # its writer removed it first
    return count


class Scanner:
    """Reads the header of every file, then looks for new files every ``interval`` seconds.

    ``found``, ``lost`` and ``bad`` are called on its thread or on that of ``look``.
    """

    def __init__(
        self,
        directory: Path,
        files: FileSystem,
        names: Names,
        *,
        known: Callable[[], set[str]],
        found: Callable[[Entry], None],
        lost: Callable[[str], None],
        bad: Callable[[BadSnapshot, str], None],
        interval: float,
    ) -> None:
        self._directory, self._files, self._names, self._interval = directory, files, names, interval
        self._known, self._found, self._lost, self._bad = known, found, lost, bad
        self._failed: set[str] = set()
        self._stop = threading.Event()
        self.done = threading.Event()
        """Set when the first scan is over."""
        self._thread = threading.Thread(target=self._run, name="cache-scan", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Stops it after the file that it is reading; returns whether that took at most ``timeout`` seconds."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def look(self, name: str) -> Entry | None:
        """Reads the header of one file, if it is there and good."""
        try:
            head, status = read_head(self._directory, name, self._files)
        except FileNotFoundError:
            return None
        except BadSnapshot as error:
            self._bad(error, name)
            return None
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                logger.warning("%s cannot be read: %s", self._directory / file_name(name), error.strerror or error)
            return None
        entry = Entry(head, status.st_size, status.st_mtime)
        self._found(entry)
        return entry

    def bar(self, name: str) -> None:
        """Excludes a file that is bad and cannot be removed from now on."""
        self._failed.add(name)

    def _run(self) -> None:
        try:
            remove_leftovers(self._directory, self._files)
        except OSError as error:
            logger.warning("%s: what was left half written stays: %s", self._directory, error.strerror or error)
        seen, complained = None, False
        while not self._stop.is_set():
            try:
                changed = self._files.stat(self._directory).st_mtime_ns
                # A change in the same tick of the clock as a listing may not be in it.
                if changed != seen or time.time_ns() - changed < 2 * 10**9:
                    self._update()
                self._names.refresh()
                seen, complained = changed, False
            except OSError as error:
                if not complained:
                    logger.warning("%s cannot be listed: %s", self._directory, error.strerror or error)
                seen, complained = None, True
            self.done.set()
            self._stop.wait(self._interval)

    def _update(self) -> None:
        known = self._known()  # before the listing: what is written in between would otherwise seem lost
        names = snapshot_names(self._directory, self._files)
        for name in known - names:
            self._lost(name)
        self._failed &= names
        for name in sorted(names - known - self._failed):
            if self._stop.is_set():
                return
            self.look(name)
