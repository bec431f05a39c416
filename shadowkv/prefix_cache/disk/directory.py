"""``Directory``: what is known of a directory of snapshots, which other servers may change.

``Scanner`` looks for other servers' changes on a thread of its own. The disk tier has a directory and a scanner.
``shadowkv cache`` reads a directory once (``inventory.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from shadowkv.prefix_cache.disk.files import SnapshotFile
from shadowkv.prefix_cache.disk.filesystem import TEMPORARY, FileSystem
from shadowkv.prefix_cache.disk.header import BadSnapshot, FileHeader, file_name, snapshot_name
from shadowkv.prefix_cache.disk.names import CLOCK_NANOSECONDS, Names
from shadowkv.prefix_cache.stats import Counts

logger = logging.getLogger(__name__)

TEMPORARY_SECONDS = 3600.0
"""Age, in seconds since the last write, from which a temporary file counts as abandoned."""


class Directory:
    """The headers of snapshots' files by name, with each file's last use. A use is a read or a write by any process.
    Its time is in seconds since 1970. Any thread may call the methods. Only those that say so wait for the disk.

    Args:
        path: path of the directory.
        files: how the disk is accessed.
        counts: statistics of the disk tier, updated here.
        report: called with each event and its file. Events are "found", "stored", "evicted", "lost" and "bad".

    Attributes:
        names: the names under which prompts are saved.
        bad: faults of files that exist and cannot be used, by name of the snapshot.
    """

    def __init__(
        self,
        path: Path,
        files: FileSystem | None = None,
        counts: Counts | None = None,
        report: Callable[[str, FileHeader], None] = lambda kind, file: None,
    ) -> None:
        self.path, self.files, self.counts, self._report = path, files or FileSystem(), counts or Counts(), report
        self.names = Names(path, self.files)
        self.bad: dict[str, BadSnapshot] = {}
        self._lock = threading.Lock()
        self._headers: dict[str, FileHeader] = {}
        self._used: dict[str, float] = {}
        self._of_key: Counter[str] = Counter()
        self._bytes = 0

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self._headers)

    def num_files_of(self, key: str) -> int:
        """Number of files with this key."""
        return self._of_key[key]

    @property
    def bytes(self) -> int:
        """Bytes of all files on the disk."""
        return self._bytes

    def insert(self, header: FileHeader, used: float) -> None:
        """Adds a file. It replaces a file with the same name."""
        nbytes = header.file_bytes
        with self._lock:
            self._drop(header.name)
            self._headers[header.name], self._used[header.name] = header, used
            self._of_key[header.key] += 1
            self._bytes += nbytes

    def take(self, name: str) -> FileHeader | None:
        """Forgets a file. Returns its header, or None if it was not known."""
        with self._lock:
            return self._drop(name)

    def _drop(self, name: str) -> FileHeader | None:
        header = self._headers.pop(name, None)
        if header is not None:
            del self._used[name]
            self._of_key[header.key] -= 1
            self._bytes -= header.file_bytes
        return header

    def use(self, name: str, seconds: float) -> None:
        """Records when a file was used."""
        with self._lock:
            if name in self._used:
                self._used[name] = max(seconds, self._used[name])

    def get(self, name: str) -> FileHeader | None:
        """Returns the header of a file; None if it is not known."""
        return self._headers.get(name)

    def known(self) -> set[str]:
        """The names of all known files."""
        with self._lock:
            return set(self._headers)

    def size(self, names: Collection[str]) -> int:
        """Total bytes of the named files that exist."""
        with self._lock:
            return sum(self._headers[name].file_bytes for name in names if name in self._headers)

    def with_uses(self) -> list[tuple[FileHeader, float]]:
        """All headers, each with the file's last use."""
        with self._lock:
            return [(header, self._used[name]) for name, header in self._headers.items()]

    def chain(self, name: str) -> list[FileHeader]:
        """Returns a snapshot's ancestors, from the prompt's first token on, and then the snapshot itself. Empty if one
        is missing, or was not computed on the one before it."""
        chain: list[FileHeader] = []
        with self._lock:
            while name:
                header = self._headers.get(name)
                if header is None or not self.fits(header):
                    return []
                chain.append(header)
                name = header.parent
        return chain[::-1]

    def fits(self, header: FileHeader) -> bool:
        """Whether a snapshot's parent is known, and is the one that the snapshot was computed on. True if the snapshot
        has no parent."""
        if not header.parent:
            return True
        parent = self._headers.get(header.parent)
        # A parent starts earlier, so no chain is a cycle, whatever the files' headers say. A parent may end after the
        # snapshot's start, because a snapshot can continue any page of its parent.
        return (
            parent is not None
            and parent.uid == header.parent_uid
            and parent.origin == header.origin
            and parent.start < header.start <= parent.length
        )

    def by_age(self, keep: Collection[str] = ()) -> list[tuple[FileHeader, float]]:
        """Returns all files except those in ``keep``, in eviction order, each with its last use.

        Snapshots without a usable parent come first, then the least recently used. A snapshot comes before its
        ancestors, because a use of it counts as a use of its ancestors.
        """
        files = self.with_uses()
        used = {header.name: seconds for header, seconds in files}
        for header in sorted((header for header, _ in files), key=lambda header: -header.start):
            if header.parent in used:
                used[header.parent] = max(used[header.parent], used[header.name])
        others = [(header, used[header.name]) for header, _ in files if header.name not in keep]
        return sorted(others, key=lambda file: (self.fits(file[0]), file[1], -file[0].start))

    def listed(self) -> set[str]:
        """The names of all snapshots on the disk. Waits for the disk. Raises OSError."""
        return {name for file in self.files.names(self.path) if (name := snapshot_name(file)) is not None}

    def read(self, name: str) -> FileHeader:
        """Reads the header of a file and adds it. Waits for the disk. Raises the errors of ``SnapshotFile``."""
        with SnapshotFile(self.path, name, self.files) as file:
            self.insert(file.header, file.status.st_mtime)
        self.bad.pop(name, None)
        return file.header

    def unreadable(self, name: str, error: OSError) -> BadSnapshot:
        """The fault of a file that could not be read."""
        return BadSnapshot(self.path / file_name(name), f"it cannot be read, {error.strerror or error}")

    def look(self, name: str) -> FileHeader | None:
        """Reads the header of a file, adds and reports it. Returns None if the file is missing or bad. Waits for the
        disk."""
        try:
            header = self.read(name)
        except FileNotFoundError:
            return None
        except BadSnapshot as error:
            self.discard(error, name)
            return None
        except OSError as error:
            if name not in self.bad:
                fault = self.bad[name] = self.unreadable(name, error)
                logger.warning("%s", fault)
            return None
        self._report("found", header)
        return header

    def look_for_changes(self, go_on: Callable[[], bool]) -> None:
        """Looks for files that other processes have added or removed. Stops when ``go_on`` returns False. Waits for the
        disk. Raises OSError if the directory cannot be listed."""
        known = self.known()  # read first: a file written after the listing would otherwise seem lost
        there = self.listed()
        for name in known - there:
            self.lost(name)
        for name in set(self.bad) - there:
            self.bad.pop(name, None)
        for name in sorted(there - known - set(self.bad)):
            if not go_on():
                return
            self.look(name)

    def stored(self, header: FileHeader) -> None:
        """Records that this process has written a file."""
        self.insert(header, time.time())
        self.counts.add(copied_bytes=header.file_bytes)
        self._report("stored", header)

    def lost(self, name: str) -> None:
        """Records that a file is gone."""
        if (header := self.take(name)) is not None:
            self._report("lost", header)

    def remove(self, name: str) -> None:
        """Removes a file. Waits for the disk. Raises OSError."""
        self.files.remove(self.path / file_name(name))
        self.take(name)

    def evict(self, header: FileHeader) -> None:
        """Removes a file to make room. Waits for the disk. Raises OSError."""
        self.remove(header.name)
        self.counts.add(evictions=1)
        self._report("evicted", header)

    def discard(self, error: BadSnapshot, name: str) -> None:
        """Removes a corrupt file. A file that cannot be removed is ignored from now on. Waits for the disk."""
        header = self.take(name)
        self.counts.add(corrupt=1)
        try:
            self.files.remove(error.path)
            error.action = "removed"
        except OSError as failure:
            self.bad[name] = error
            error.action = f"not served, and cannot be removed: {failure.strerror or failure}"
        logger.warning("%s", error)
        if header is not None:
            self._report("bad", header)

    def touch(self, name: str) -> None:
        """Records that a file is used now. If possible, also sets the file's time on the disk. Waits for the disk."""
        now = time.time()
        self.use(name, now)
        with suppress(OSError):  # the file is read-only or gone, so its age on the disk does not matter
            self.files.touch(self.path / file_name(name), now)

    def remove_leftovers(self) -> int:
        """Removes temporary files of killed writers. Returns the number of files. Waits for the disk. Raises
        OSError."""
        count = 0
        for name in self.files.names(self.path):
            if name.startswith(TEMPORARY):
                with suppress(FileNotFoundError):  # its writer removed it first
                    if time.time() - self.files.stat(self.path / name).st_mtime > TEMPORARY_SECONDS:
                        self.files.remove(self.path / name)
                        count += 1
        return count


class Scanner:
    """A thread that reads the header of every file of a directory, then looks for changes every ``interval`` seconds.

    Attributes:
        done: set after the first scan.
    """

    def __init__(self, directory: Directory, interval: float) -> None:
        self._directory, self._interval = directory, interval
        self._stop, self.done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache-scan", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Stops the thread after the current file. Returns whether it has ended within ``timeout`` seconds."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        directory, files = self._directory, self._directory.files
        try:
            directory.remove_leftovers()
        except OSError as error:
            logger.warning("%s: half-written files could not be removed: %s", directory.path, error.strerror or error)
        seen, complained = None, False
        while not self._stop.is_set():
            try:
                changed = files.stat(directory.path).st_mtime_ns
                if changed != seen or time.time_ns() - changed < CLOCK_NANOSECONDS:
                    directory.look_for_changes(lambda: not self._stop.is_set())
                directory.names.refresh()
                seen, complained = changed, False
            except OSError as error:
                if not complained:
                    logger.warning("%s cannot be listed: %s", directory.path, error.strerror or error)
                seen, complained = None, True
            self.done.set()
            self._stop.wait(self._interval)
