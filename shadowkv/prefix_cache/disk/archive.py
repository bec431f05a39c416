"""Exports snapshots and names to a tar file, and imports them. ``shadowkv cache export`` and ``import`` call it.

In the file, a snapshot comes after its ancestors, and a name after the snapshots that it keeps. An import checks
everything in the file.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from shadowkv.kvcache.snapshots.dataclass_json import MAX_BYTES, from_json, to_json
from shadowkv.prefix_cache.disk.directory import Directory
from shadowkv.prefix_cache.disk.files import SnapshotFile
from shadowkv.prefix_cache.disk.filesystem import FileSystem, NewFile
from shadowkv.prefix_cache.disk.header import BadSnapshot, FileHeader, snapshot_name
from shadowkv.prefix_cache.disk.names import FOLDER, SUFFIX, Save, name_file
from shadowkv.prefix_cache.protocol import KEPT_NAME, UnusableName
from shadowkv.wording import counted

COPY_BYTES = 4 * 2**20

MAX_AT_ONCE = 16 * 2**20
"""Maximum number of bytes that are read into memory at once, whatever the tar file's headers say."""

_NAME_FILE = re.compile(f"{FOLDER}/({KEPT_NAME}){re.escape(SUFFIX)}")


def export_snapshots(
    directory: Path,
    headers: Sequence[FileHeader],
    saves: Mapping[str, Save],
    target: Path,
    progress: Callable[[int], object] = lambda count: None,
) -> None:
    """Writes snapshots to a new tar file, then the names that keep them. Each snapshot is verified first.

    Raises OSError, including FileExistsError, and BadSnapshot. After an error the new file is removed.
    """
    if target.exists():
        raise FileExistsError(f"{target} already exists; name another file or move it away")
    with NewFile(target.resolve().parent, FileSystem()) as new:
        with (
            os.fdopen(new.descriptor, "wb", closefd=False) as raw,
            tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive,
        ):
            for header in headers:
                with SnapshotFile(directory, header.name) as file, file.stream() as stream:
                    file.verify(progress)
                    member = tarfile.TarInfo(file.header.file_name)
                    member.size, member.mtime, member.mode = file.status.st_size, int(file.status.st_mtime), 0o600
                    archive.addfile(member, stream)
            for name, save in saves.items():
                data, member = to_json(save).encode(), tarfile.TarInfo(name_file(name))
                member.size, member.mtime, member.mode = len(data), save.saved, 0o600
                archive.addfile(member, io.BytesIO(data))
        if not new.publish(target, lambda: False):
            raise FileExistsError(f"{target} already exists")


class _Bounded(io.BufferedReader):
    """Limits the size of reads. A tar file's headers state their own lengths, which may be far too large."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_AT_ONCE:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def import_snapshots(
    directory: Path, source: Path, progress: Callable[[int], object] = lambda count: None
) -> list[tuple[str, str]]:
    """Imports the snapshots and names of a tar file into a directory, which is created if it is missing.

    Returns:
        Each member's name with its outcome: "imported", "there already", or the reason why it was refused.

    Raises OSError, and ValueError if the file is not a tar file.
    """
    outcomes, target = [], Directory(directory)
    target.files.make_directory(directory)
    try:
        with _Bounded(io.FileIO(source)) as raw, tarfile.open(fileobj=raw, mode="r:") as archive:
            size = source.stat().st_size
            for member in archive:
                try:
                    outcome = _take(target, archive, member, size, progress)
                except BadSnapshot as error:
                    outcome = f"refused: {error.problem}"
                outcomes.append((member.name, outcome))
    except (tarfile.TarError, EOFError) as error:
        before = f"; the {counted(len(outcomes), 'file')} before it were read" if outcomes else ""
        raise ValueError(f"{source} is no tar file, or was cut off: {error}{before}") from error
    return outcomes


def _take(
    target: Directory, archive: tarfile.TarFile, member: tarfile.TarInfo, size: int, progress: Callable[[int], object]
) -> str:
    name, saved_as = snapshot_name(member.name), _NAME_FILE.fullmatch(member.name)
    if name is None and saved_as is None:
        return "refused: the file name is neither that of a snapshot nor that of a saved name"
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        return "refused: not a regular file"
    if member.offset_data + member.size > size:
        raise tarfile.ReadError(f"{member.name} should have {member.size} bytes, but the file ends before")
    stream = archive.extractfile(member)
    assert stream is not None  # it is None only for members that are not files
    if name is not None:
        return _take_snapshot(target, name, stream, progress)
    assert saved_as is not None
    if member.size > MAX_BYTES:
        return f"refused: {member.size} bytes are more than the limit of {MAX_BYTES} for a saved name"
    return _take_name(target, saved_as[1], stream.read())


def _take_snapshot(target: Directory, name: str, stream: IO[bytes], progress: Callable[[int], object]) -> str:
    with NewFile(target.path, target.files) as new:
        size = 0
        while data := stream.read(COPY_BYTES):
            new.write(data, size)
            size += len(data)
            progress(len(data))
        with SnapshotFile(target.path, name, temporary=new.path) as file:
            file.verify()
            header = file.header
        if not _is_of_use(target, header):
            return "refused: the snapshot that it continues is missing, or is another one of the same name"

        def replace_existing() -> bool:
            existing = _read(target, name)
            return existing is None or not _is_of_use(target, existing)

        return "imported" if new.publish(target.path / header.file_name, replace_existing) else "there already"


def _take_name(target: Directory, name: str, data: bytes) -> str:
    try:
        save = from_json(Save, data)
    except ValueError as error:
        return f"refused: {error}"
    if not save.is_of(_used(target, save.snapshots)):
        return "refused: snapshots that it keeps are missing, or are not those that it names"
    if target.names.write(name, save, replace=False):
        return "imported"
    try:
        existing = target.names.read(name)
    except UnusableName as error:
        return f"refused: {error}"
    if replace(existing, saved=save.saved) != save:
        return f"refused: something else is saved as {name!r} here; forget that first"
    return "there already"


def _used(target: Directory, snapshots: Sequence[str]) -> list[FileHeader]:
    """Returns the chain of these snapshots, or an empty list if one is missing. Marks them as used now, so that no
    server evicts them before it sees the name that keeps them."""
    for name in snapshots:
        if (header := _read(target, name)) is None:
            return []
        try:
            target.files.touch(target.path / header.file_name, time.time())
        except OSError:
            return []
    return target.chain(snapshots[-1])


def _read(target: Directory, name: str) -> FileHeader | None:
    """Returns the header of a file as it is now; None if it is missing or bad."""
    target.take(name)
    try:
        return target.read(name)
    except (OSError, BadSnapshot):
        return None


def _is_of_use(target: Directory, header: FileHeader) -> bool:
    """Whether the directory now has the parent that a snapshot was computed on. True if the snapshot has no parent."""
    if header.parent:
        _read(target, header.parent)
    return target.fits(header)
