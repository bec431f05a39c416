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
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shadowkv.prefix_cache.disk.files import Buffer, SnapshotFile, SnapshotGone
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.head import BadSnapshot, Head, file_name
from shadowkv.prefix_cache.disk.index import Entry, Index
from shadowkv.prefix_cache.disk.names import Names, Save, name_file
from shadowkv.prefix_cache.disk.scan import Scanner
from shadowkv.prefix_cache.disk.workers import Workers
from shadowkv.prefix_cache.disk.writer import Writer, WriterLimits
from shadowkv.prefix_cache.page_names import CacheKey, TokenIds
from shadowkv.prefix_cache.protocol import UnknownName, UnusableName
from shadowkv.prefix_cache.stats import Counts, DiskStats

logger = logging.getLogger(__name__)


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
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        key: CacheKey,
        on_event: Callable[[str, Entry], None] = lambda kind, entry: None,
        *,
        files: FileSystem | None = None,
        readers: int = 2,
        queue_bytes: int = 4 * 2**30,
        pause_seconds: float = 30.0,
        watch_seconds: float = 1.0,
    ) -> None:
        self.directory, self.limit_bytes, self.key = Path(directory), limit_bytes, key
        self._files = files or FileSystem()
        self._files.make_directory(self.directory)
        mode = stat.S_IMODE(self._files.stat(self.directory).st_mode)
        if mode & 0o077:
            logger.warning("%s holds prompts and is open to other users (mode %o, not 700)", self.directory, mode)
        self._event = on_event
        self._index, self._counts = Index(), Counts()
        self._names = Names(self.directory, self._files)
        self._scanner = Scanner(
            self.directory,
            self._files,
            self._names,
            known=self._index.names,
            found=self._found,
            lost=self._lost,
            bad=self._discard,
            interval=watch_seconds,
        )
        self._writer = Writer(
            self.directory,
            WriterLimits(limit_bytes, queue_bytes, pause_seconds),
            self._index,
            self._counts,
            self._files,
            self._names,
            look=self._scanner.look,
            complete=self._scanner.done.is_set,
            event=on_event,
        )
        self._token_reader = Workers(1, "cache-tokens")
        self._restorer = Workers(2, "cache-restore")
        self._readers = Workers(readers, "cache-read")
        self._name_reader = Workers(1, "cache-names")

    def lookup(self, name: str) -> Entry | None:
        """A snapshot that is known to be there; what it continues may not be. Never waits and counts nothing."""
        entry = self._index.get(name)
        return entry if entry is not None and entry.head.key == self.key.digest else None

    def chain(self, name: str) -> list[Entry]:
        """The snapshots that lead to one, itself last; empty if not all of them are known to be there. Never waits."""
        return self._index.chain(name) if self.lookup(name) is not None else []

    def look(self, names: Iterable[str]) -> Future[bool]:
        """Looks for snapshots that were not known to be there, as other servers write some; whether all are there."""

        def look() -> bool:
            return all([self._scanner.look(name) is not None for name in names])

        return self._name_reader.submit(look)

    def wait_scanned(self, timeout: float | None = None) -> bool:
        """Waits up to ``timeout`` seconds until the directory has been scanned; returns whether it has."""
        return self._scanner.done.wait(timeout)

    def token_ids(self, entry: Entry) -> Future[npt.NDArray[np.uint32]]:
        """Ids of the tokens from ``start`` to ``length`` of an entry; the future raises as that of ``read`` does."""

        def ids(file: SnapshotFile) -> npt.NDArray[np.uint32]:
            return file.token_ids()

        return self._token_reader.submit(self._using, entry, ids)

    def read(self, entry: Entry, buffers: Sequence[Buffer], token_ids: TokenIds) -> Future[float]:
        """Fills ``buffers`` with the bytes of all layers of an entry; returns the seconds since it was asked for.

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
                self._using(entry, fill)
            except BaseException:
                self._counts.add(misses=1)
                raise
            seconds = time.monotonic() - asked
            self._counts.add(hits=1, restored_bytes=entry.head.nbytes, restore_seconds=seconds)
            self._touch(entry)
            return seconds

        return self._restorer.submit(restore)

    def _using(self, entry: Entry, use: Callable[[SnapshotFile], Any]) -> Any:
        name = entry.name
        try:
            with SnapshotFile(self.directory, name, self._files) as file:
                try:
                    if file.head.uid != entry.head.uid:
                        raise SnapshotGone(f"{file.path} is not what it was")
                    return use(file)
                except BadSnapshot as error:
                    if not file.is_current():
                        raise SnapshotGone(f"{file.path} was replaced") from error
                    raise
        except FileNotFoundError as error:
            self._lost(name)
            raise SnapshotGone(f"{error.filename} is not there any more") from None
        except SnapshotGone:
            self._lost(name)
            self._scanner.look(name)
            raise
        except BadSnapshot as error:
            self._discard(error, name)
            raise
        except OSError as error:
            self._counts.add(read_errors=1)
            logger.warning("%s cannot be read: %s", self.directory / file_name(name), error.strerror or error)
            raise

    def _touch(self, entry: Entry) -> None:
        now = time.time()
        self._index.used(entry.name, now)
        with suppress(OSError):  # read-only or gone: its age on the disk does not matter then
            self._files.touch(self.directory / file_name(entry.name), now)

    def put(self, head: Head, token_ids: TokenIds, slabs: Iterable[Buffer]) -> Future[bool]:
        """Has a snapshot written; the future says whether it is on the disk, False if it was refused, has failed, or
        another with its name is there.

        Args:
            head: from ``Head.new`` with this tier's key; what it continues must be on the disk, or queued before it.
            token_ids: from ``start`` to ``length``.
            slabs: bytes of all layers in order, split anywhere; iterated on the writing thread, each used up before the
                next is requested. If they can be iterated again, as a list can, a write that finds the disk full gets
                a second try.

        Ids and slabs may be reused only when the future is done. Raises ValueError for the head of another key.
        """
        if head.key != self.key.digest:
            raise ValueError(f"the snapshot is of key {head.key}, this tier's is {self.key.digest}")
        return self._writer.put(head, token_ids, slabs)

    @property
    def problem(self) -> str | None:
        """Why nothing is written at present, after a failure; None where writing goes on. Does not wait."""
        return self._writer.problem

    def keep(self, name: str, tokens: int, chain: Sequence[Entry]) -> Future[None]:
        """Keeps a chain's files under a name, for ``tokens`` tokens of a prompt, in place of what was there.

        The future raises SnapshotGone where one of them is gone, OSError where the name cannot be written.
        """
        save = Save.new(self.key.digest, tokens, tuple(entry.name for entry in chain))
        return self._writer.keep(name, save)

    def kept(self, name: str) -> Future[tuple[Save, list[Entry]]]:
        """What is kept under a name, and its chain.

        The future raises UnknownName, also where files of the chain are gone, UnusableName, and OSError.
        """
        return self._name_reader.submit(self._kept, name)

    def _kept(self, name: str) -> tuple[Save, list[Entry]]:
        save = self._names.read(name)
        if save.key != self.key.digest:
            raise UnusableName(
                f"what is saved as {name!r} is of another model or policy (key {save.key[:10]}, this server's is "
                f"{self.key.digest[:10]})"
            )
        for snapshot in save.snapshots:  # known ones, too: another server may have rewritten it, or a read failed
            self._scanner.look(snapshot)
        chain = self._index.chain(save.snapshots[-1])
        if not chain:
            raise UnknownName(f"what was saved as {name!r} is not all there any more; save it anew")
        if not save.is_of(chain):
            raise UnusableName(f"{name_file(name)} is not what was written: no such prompt; save it anew")
        return save, chain

    def stats(self) -> DiskStats:
        """Counts so far, and what is there now."""
        return self._counts.now(self._index.bytes, self._index.files, self._index.size(self._names.pins))

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

    def _found(self, entry: Entry) -> None:
        self._index.add(entry)
        self._event("found", entry)

    def _lost(self, name: str) -> None:
        if (entry := self._index.remove(name)) is not None:
            self._event("lost", entry)

    def _discard(self, error: BadSnapshot, name: str) -> None:
        entry = self._index.remove(name)
        self._counts.add(corrupt=1)
        try:
            self._files.remove(error.path)
            error.action = "removed"
        except OSError as failure:
            self._scanner.bar(name)
            error.action = f"not served, and cannot be removed: {failure.strerror or failure}"
        logger.warning("%s", error)
        if entry is not None:
            self._event("bad", entry)
