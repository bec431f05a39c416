"""The disk tier of the prefix cache: a directory of snapshots, which several servers may share.

The directory is authoritative: its contents are found out in the background, what is gone is a miss, and what is not
as it was written is removed. Nothing here makes its caller wait for a disk: reads and writes return futures.
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
from shadowkv.prefix_cache.page_names import CacheKey, TokenIds
from shadowkv.prefix_cache.protocol import UnknownName, UnusableName
from shadowkv.prefix_cache.stats import Counts, TierStats

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DiskTier:
    """Snapshots of one key in a directory; every method may be called from any thread.

    Args:
        directory: created with access for its owner only if it is missing; OSError if that fails. It may be read-only.
        limit_bytes: of all files; the least recently used ones go first.
        key: of the snapshots that are served; others in the directory count towards the limit and are evicted likewise.
        on_event: called with what happened to which file: "found", "stored", "evicted", "lost" or "bad". It runs on the
            tier's threads, and must neither block nor raise.
        files: how the disk is accessed.
        readers: number of threads that read one file together.
        queue_bytes: of snapshots waiting to be written; what does not fit is refused.
        pause_seconds: without writes after a failed one.
        watch_seconds: between two looks for other servers' files.

    Attributes:
        counts: what has been done so far.
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
        """A snapshot that is known to be there; what it continues may not be. Never waits and counts nothing."""
        header = self._directory.get(name)
        return header if header is not None and header.key == self.key.digest else None

    def chain(self, name: str) -> list[FileHeader]:
        """The snapshots that lead to one, itself last; empty if not all of them are known to be there. Never waits."""
        return self._directory.chain(name) if self.lookup(name) is not None else []

    def look(self, names: Iterable[str]) -> Future[bool]:
        """Looks for snapshots that were not known to be there, as other servers write some; whether all are there."""

        def look() -> bool:
            return all([self._directory.look(name) is not None for name in names])

        return self._name_reader.submit(look)

    def wait_scanned(self, timeout: float | None = None) -> bool:
        """Waits up to ``timeout`` seconds until the directory has been scanned; returns whether it has."""
        return self._scanner.done.wait(timeout)

    def token_ids(self, header: FileHeader) -> Future[npt.NDArray[np.uint32]]:
        """Ids of the tokens that a file covers; the future raises as that of ``read`` does."""
        return self._token_reader.submit(self._using, header, SnapshotFile.token_ids)

    def read(self, header: FileHeader, buffers: Sequence[Buffer], token_ids: TokenIds) -> Future[float]:
        """Fills ``buffers`` with the bytes of all layers of a file; returns the seconds since it was asked for.

        ``token_ids`` are those that it must hold, from ``start`` to ``length``. The buffers' contents are valid only if
        the future raises nothing; they are the caller's again when it is done. It raises SnapshotGone if the file is
        gone, BadSnapshot if it is not what was written, OSError if it cannot be read, each counted as a miss.
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
        """What ``use`` makes of a file, which must have this header; what is wrong with it is recorded."""
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
        """Has a snapshot written; the future says whether it is on the disk, False if it was refused, has failed, or
        another with its name is there.

        Args:
            header: with this tier's key; what it continues must be on the disk, or queued before it.
            token_ids: from ``start`` to ``length``.
            slabs: bytes of all layers in order, split anywhere; iterated on the writing thread, each used up before the
                next is requested. If they can be iterated again, as a list can, a write that finds the disk full gets
                a second try.

        Ids and slabs may be reused only when the future is done. Raises ValueError for the header of another key.
        """
        if header.key != self.key.digest:
            raise ValueError(f"the snapshot is of key {header.key}, this tier's is {self.key.digest}")
        return self._writer.put(header, token_ids, slabs)

    @property
    def problem(self) -> str | None:
        """Why nothing is written at present, after a failure; None where writing goes on. Does not wait."""
        return self._writer.problem

    def keep(self, name: str, tokens: int, chain: Sequence[FileHeader]) -> Future[None]:
        """Keeps a chain's files under a name, for ``tokens`` tokens of a prompt, in place of what was there.

        The future raises SnapshotGone where one of them is gone, OSError where the name cannot be written.
        """
        save = Save.new(self.key.digest, tokens, tuple(header.name for header in chain))
        return self._writer.keep(name, save)

    def kept(self, name: str) -> Future[tuple[Save, list[FileHeader]]]:
        """What is kept under a name, and its chain.

        The future raises UnknownName, also where files of the chain are gone, UnusableName, and OSError.
        """
        return self._name_reader.submit(self._kept, name)

    def _kept(self, name: str) -> tuple[Save, list[FileHeader]]:
        save = self._directory.names.read(name)
        if save.key != self.key.digest:
            raise UnusableName(
                f"what is saved as {name!r} is of another model or policy (key {save.key[:10]}, this server's is "
                f"{self.key.digest[:10]})"
            )
        for snapshot in save.snapshots:  # known ones, too: another server may have rewritten it, or a read failed
            self._directory.look(snapshot)
        chain = self._directory.chain(save.snapshots[-1])
        if not chain:
            raise UnknownName(f"what was saved as {name!r} is not all there any more; save it anew")
        if not save.is_of(chain):
            raise UnusableName(f"{name_file(name)} is not what was written: no such prompt; save it anew")
        return save, chain

    def stats(self) -> TierStats:
        """Counts so far, and what is there now."""
        directory = self._directory
        pinned_bytes = directory.size(directory.names.pins)
        return self.counts.now(directory.bytes, self.limit_bytes, pinned_bytes, directory.num_files)

    def close(self, timeout: float = 10.0) -> bool:
        """Closes the tier: queued writes are completed, within ``timeout`` seconds, and queued reads are cancelled.

        Returns whether all was written and no thread is left. One that a disk holds up for longer uses its buffers
        until its future is done.
        """
        deadline = time.monotonic() + timeout
        ends = [self._writer.close(timeout), self._scanner.close(max(0.1, deadline - time.monotonic()))]
        # Readers last: a restore that is cut short waits for its reads.
        for workers in (self._name_reader, self._token_reader, self._restorer, self._readers):
            ends.append(workers.close(max(0.1, deadline - time.monotonic())))
        return all(ends)
