"""``DiskTier``: the disk tier of the prefix cache, a directory of snapshots that several servers may share.

The directory is authoritative. It is scanned in the background, a removed file is a miss, and a corrupt file is
removed. Callers never wait for the disk: reads and writes return futures.
"""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shadowkv.prefix_cache.disk.directory import Directory, Scanner
from shadowkv.prefix_cache.disk.files import Buffer, SnapshotFile, SnapshotGone
from shadowkv.prefix_cache.disk.filesystem import FileSystem, Workers
from shadowkv.prefix_cache.disk.header import BadSnapshot, FileHeader
from shadowkv.prefix_cache.disk.names import Save, name_file
from shadowkv.prefix_cache.disk.writer import Writer
from shadowkv.prefix_cache.page_hashes import CacheKey, TokenIds
from shadowkv.prefix_cache.protocol import UnknownName, UnusableName
from shadowkv.prefix_cache.stats import Counts, TierStats

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DiskTier:
    """The snapshots of one key in a directory. Any thread may call its methods.

    Args:
        directory: path of the directory. If it is missing, it is created with access only for its owner. It may be
            read-only.
        limit_bytes: maximum number of bytes of all files. The least recently used files are evicted first.
        key: key of the snapshots that are served. Files with other keys count towards the limit and are evicted too.
        on_event: called with each event and its file. Events are "found", "stored", "evicted", "lost" and "bad". It is
            called on the tier's threads, and must neither block nor raise.
        files: how the disk is accessed.
        readers: number of threads that read one file together.
        queue_bytes: maximum number of bytes of snapshots that wait to be written. Further snapshots are refused.
        pause_seconds: seconds without writes after a failed write.
        watch_seconds: seconds between two searches for other servers' files.

    Attributes:
        counts: statistics so far.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        key: CacheKey,
        on_event: Callable[[str, FileHeader], None] = lambda kind, file: None,
        *,
        files: FileSystem | None = None,
        readers: int = 2,
        queue_bytes: int = 4 * 2**30,
        pause_seconds: float = 30.0,
        watch_seconds: float = 1.0,
    ) -> None:
        directory, files, self.limit_bytes, self.key = Path(directory), files or FileSystem(), limit_bytes, key
        files.make_directory(directory)
        mode = stat.S_IMODE(files.stat(directory).st_mode)
        if mode & 0o077:
            logger.warning("%s holds prompts and is open to other users (mode %o, not 700)", directory, mode)
        self.counts = Counts()
        self._directory = Directory(directory, files, self.counts, on_event)
        self._scanner = Scanner(self._directory, watch_seconds)
        self._writer = Writer(
            self._directory,
            self._scanner.done.is_set,
            limit_bytes=limit_bytes,
            queue_bytes=queue_bytes,
            pause_seconds=pause_seconds,
        )
        self._token_reader = Workers(1, "cache-tokens")
        self._restorer = Workers(2, "cache-restore")
        self._readers = Workers(readers, "cache-read")
        self._name_reader = Workers(1, "cache-names")

    def lookup(self, name: str) -> FileHeader | None:
        """Returns the header of a snapshot if it is known to exist, or None. Its ancestors may be missing. Does not
        wait for the disk."""
        header = self._directory.get(name)
        return header if header is not None and header.key == self.key.digest else None

    def chain(self, name: str) -> list[FileHeader]:
        """Returns a snapshot's ancestors in order, and then the snapshot. Empty if not all are known to exist. Does not
        wait for the disk."""
        return self._directory.chain(name) if self.lookup(name) is not None else []

    def look(self, names: Iterable[str]) -> Future[bool]:
        """Looks on the disk for snapshots that other servers may have written. The result is whether all exist."""

        def look() -> bool:
            return all([self._directory.look(name) is not None for name in names])

        return self._name_reader.submit(look)

    def wait_scanned(self, timeout: float | None = None) -> bool:
        """Waits up to ``timeout`` seconds until the directory has been scanned. Returns whether it has."""
        return self._scanner.done.wait(timeout)

    def token_ids(self, header: FileHeader) -> Future[npt.NDArray[np.uint32]]:
        """The ids of a file's tokens. The future raises the errors of ``read``."""
        return self._token_reader.submit(self._using, header, SnapshotFile.token_ids)

    def read(self, header: FileHeader, buffers: Sequence[Buffer], token_ids: TokenIds) -> Future[float]:
        """Fills ``buffers`` with the bytes of all layers of a file. The result is the number of seconds from the call
        to the end of the read.

        ``token_ids`` are the expected ids of the file's tokens, from ``start`` to ``length``. When the future is done,
        the caller may use the buffers again. Their contents are valid only if the future raises nothing. It raises
        SnapshotGone if the file is gone, BadSnapshot if the file is corrupt, and OSError if the file cannot be read.
        Each of these errors counts as a miss.
        """
        asked = time.monotonic()

        def fill(file: SnapshotFile) -> None:
            file.expect(token_ids)
            file.read_into(buffers, self._readers)

        def restore() -> float:
            try:
                self._using(header, fill)
            except BaseException:
                self.counts.add(misses=1)
                raise
            seconds = time.monotonic() - asked
            self.counts.add(restores=1, restored_bytes=header.nbytes, restore_seconds=seconds)
            self._directory.touch(header.name)
            return seconds

        return self._restorer.submit(restore)

    def _using(self, header: FileHeader, use: Callable[[SnapshotFile], Result]) -> Result:
        """Calls ``use`` with the file. Raises SnapshotGone if the file now has another ``uid``. Records faults of the
        file."""
        directory, name = self._directory, header.name
        try:
            with SnapshotFile(directory.path, name, directory.files) as file:
                try:
                    if file.header.uid != header.uid:
                        raise SnapshotGone(f"{file.path} is not what it was")
                    return use(file)
                except BadSnapshot as error:
                    if not file.is_current():
                        raise SnapshotGone(f"{file.path} was replaced") from error
                    raise
        except FileNotFoundError as error:
            directory.lost(name)
            raise SnapshotGone(f"{error.filename} is not there any more") from None
        except SnapshotGone:
            directory.lost(name)
            directory.look(name)
            raise
        except BadSnapshot as error:
            directory.discard(error, name)
            raise
        except OSError as error:
            self.counts.add(read_errors=1)
            logger.warning("%s cannot be read: %s", directory.path / header.file_name, error.strerror or error)
            raise

    def put(self, header: FileHeader, token_ids: TokenIds, slabs: Iterable[Buffer]) -> Future[bool]:
        """Queues a snapshot to be written. The result is whether it is on the disk. It is False if the snapshot was
        refused, could not be written, or if another snapshot has its name.

        Ids and slabs may be changed only after the future is done.

        Args:
            header: has this tier's key. Its parent must be on the disk, or queued before it.
            token_ids: ids of the tokens from ``start`` to ``length``.
            slabs: bytes of all layers in order, split anywhere. The writing thread requests the next slab after it has
                used the previous one. If slabs can be iterated again, like a list, a write that finds the disk full is
                tried once more after an eviction.

        Raises:
            ValueError: the header has another key.
        """
        if header.key != self.key.digest:
            raise ValueError(f"the snapshot is of key {header.key}, this tier's is {self.key.digest}")
        return self._writer.put(header, token_ids, slabs)

    @property
    def problem(self) -> str | None:
        """Why writing is paused after a failure; None if writing is not paused. Does not wait for the disk."""
        return self._writer.problem

    def keep(self, name: str, tokens: int, chain: Sequence[FileHeader]) -> Future[None]:
        """Saves a chain, which has the first ``tokens`` tokens of a prompt, under a name. Replaces what was saved under
        the name.

        The future raises SnapshotGone if a snapshot is gone, and OSError if the name cannot be written.
        """
        save = Save.new(self.key.digest, tokens, tuple(header.name for header in chain))
        return self._writer.keep(name, save)

    def kept(self, name: str) -> Future[tuple[Save, list[FileHeader]]]:
        """Reads the save of a name, and its chain.

        The future raises UnknownName if nothing is saved under the name or a snapshot is gone, UnusableName, and
        OSError.
        """
        return self._name_reader.submit(self._kept, name)

    def _kept(self, name: str) -> tuple[Save, list[FileHeader]]:
        save = self._directory.names.read(name)
        if save.key != self.key.digest:
            raise UnusableName(
                f"what is saved as {name!r} is of another model, policy or number of GPUs (key {save.key[:10]}, this "
                f"server's is {self.key.digest[:10]})"
            )
        for snapshot in save.snapshots:  # also known ones: another server may have rewritten them
            self._directory.look(snapshot)
        chain = self._directory.chain(save.snapshots[-1])
        if not chain:
            raise UnknownName(f"snapshots of the saved name {name!r} are missing; save it again")
        if not save.is_of(chain):
            raise UnusableName(f"{name_file(name)} is not what was written: no such prompt; save it anew")
        return save, chain

    def stats(self) -> TierStats:
        """Statistics of the tier."""
        directory = self._directory
        pinned_bytes = directory.size(directory.names.pins)
        return self.counts.now(
            directory.bytes,
            self.limit_bytes,
            pinned_bytes=pinned_bytes,
            files=directory.num_files,
            other_files=directory.num_files - directory.num_files_of(self.key.digest),
        )

    def close(self, timeout: float = 10.0) -> bool:
        """Closes the tier. Queued writes are done within ``timeout`` seconds, and queued reads are cancelled.

        Returns whether all was written and all threads have ended. A thread that still waits for the disk uses its
        buffers until its future is done.
        """
        deadline = time.monotonic() + timeout
        ends = [self._writer.close(timeout), self._scanner.close(max(0.1, deadline - time.monotonic()))]
        # ``_readers`` are closed last, because a restore in progress waits for their reads.
        for workers in (self._name_reader, self._token_reader, self._restorer, self._readers):
            ends.append(workers.close(max(0.1, deadline - time.monotonic())))
        return all(ends)
