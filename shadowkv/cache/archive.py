"""Snapshots in a tar file, each with all that it continues; what comes out of one is believed no further than it is
checked."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from shadowkv.cache.errors import BadSnapshot
from shadowkv.cache.files import SnapshotFile, read_head, temporary_path
from shadowkv.cache.filesystem import FileSystem
from shadowkv.cache.head import Head, file_name
from shadowkv.cache.index import Entry
from shadowkv.cache.inventory import Inventory
from shadowkv.cache.key import is_name

COPY_BYTES = 4 * 2**20

MOST_AT_ONCE = 16 * 2**20
"""Bytes that a tar file may have read into memory at once, whatever its own headers say."""


def chains(inventory: Inventory, names: Sequence[str]) -> list[Entry]:
    """Snapshots and what they continue, that first, each once; raises ValueError for one that is of no use."""
    found: dict[str, Entry] = {}
    for name in names:
        if name in inventory.bad:
            raise ValueError(str(inventory.bad[name]))
        chain = inventory.index.chain(name)
        if not chain:
            raise ValueError(f"what {name} continues is not there, or not what it was computed on")
        found |= {entry.name: entry for entry in chain}
    return list(found.values())


def export_snapshots(
    directory: Path, entries: Sequence[Entry], target: Path, progress: Callable[[int], object] = lambda count: None
) -> None:
    """Writes files to a new tar file, each after every byte of it was found good.

    Raises OSError, FileExistsError too, and BadSnapshot; nothing is left of the file then.
    """
    if target.exists():
        raise FileExistsError(f"{target} is there already; name another file or move it away")
    temporary = temporary_path(target.resolve().parent)
    try:
        with (
            os.fdopen(FileSystem().create(temporary), "wb") as raw,
            tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive,
        ):
            for entry in entries:
                with SnapshotFile(directory, entry.name) as file, file.stream() as stream:
                    file.verify(progress)
                    member = tarfile.TarInfo(file.head.file_name)
                    member.size, member.mtime, member.mode = file.status.st_size, int(file.status.st_mtime), 0o600
                    archive.addfile(member, stream)
            raw.flush()
            os.fsync(raw.fileno())
        if not FileSystem().publish(temporary, target, replace=False):
            raise FileExistsError(f"{target} is there already")
    finally:
        FileSystem().remove(temporary)


class _Bounded(io.BufferedReader):
    """A tar file's own headers are read by lengths that they say themselves."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MOST_AT_ONCE:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def import_snapshots(
    directory: Path, source: Path, progress: Callable[[int], object] = lambda count: None
) -> list[tuple[str, str]]:
    """Takes the snapshots of a tar file into a directory, which is made if need be; returns what became of each member
    by its name: "imported", "there already", or why it was refused.

    Raises OSError, and ValueError for what is no tar file.
    """
    outcomes = []
    FileSystem().make_directory(directory)
    try:
        with _Bounded(io.FileIO(source)) as raw, tarfile.open(fileobj=raw, mode="r:") as archive:
            size = source.stat().st_size
            for member in archive:
                try:
                    outcome = _take(directory, archive, member, size, progress)
                except BadSnapshot as error:
                    outcome = f"refused: {error.problem}"
                outcomes.append((member.name, outcome))
    except (tarfile.TarError, EOFError) as error:
        before = f"; {len(outcomes)} snapshots came before" if outcomes else ""
        raise ValueError(f"{source} is no tar file, or was cut off: {error}{before}") from error
    return outcomes


def _take(
    directory: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, size: int, progress: Callable[[int], object]
) -> str:
    name = member.name.removesuffix(file_name(""))
    if not is_name(name) or member.name != file_name(name):
        return "refused: not the name of a snapshot's file"
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        return "refused: not a regular file"
    if member.offset_data + member.size > size:
        raise tarfile.ReadError(f"the {member.size} bytes of {name} are more than there are")
    stream = archive.extractfile(member)
    assert stream is not None  # of a regular file
    files, temporary = FileSystem(), temporary_path(directory)
    try:
        with os.fdopen(files.create(temporary), "wb") as target:
            _copy(stream, target, progress)
            target.flush()
            os.fsync(target.fileno())
        with SnapshotFile(directory, name, temporary=temporary) as file:
            file.verify()
            head = file.head
        if head.parent and not _is_there(directory, head.parent, head.parent_uid):
            return "refused: what it continues is not there, or not what it was computed on"
        replace = not _is_of_use(directory, name)
        return "imported" if files.publish(temporary, directory / head.file_name, replace) else "there already"
    finally:
        files.remove(temporary)


def _copy(source: IO[bytes], target: IO[bytes], progress: Callable[[int], object]) -> None:
    while data := source.read(COPY_BYTES):
        target.write(data)
        progress(len(data))


def _head(directory: Path, name: str) -> Head | None:
    try:
        return read_head(directory, name)[0]
    except (OSError, BadSnapshot):
        return None


def _is_there(directory: Path, name: str, uid: str) -> bool:
    head = _head(directory, name)
    return head is not None and head.uid == uid


def _is_of_use(directory: Path, name: str) -> bool:
    head = _head(directory, name)
    return head is not None and (not head.parent or _is_there(directory, head.parent, head.parent_uid))
