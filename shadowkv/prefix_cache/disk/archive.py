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
from shadowkv.prefix_cache.disk.directory import Index
from shadowkv.prefix_cache.disk.files import SnapshotFile, read_header, temporary_path
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.prefix_cache.disk.header import BadSnapshot, FileHeader, file_name
from shadowkv.prefix_cache.disk.names import FOLDER, SUFFIX, Names, Save, name_file
from shadowkv.prefix_cache.protocol import KEPT_NAME, UnusableName, is_snapshot_name
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
    temporary = temporary_path(target.resolve().parent)
    try:
        with (
            os.fdopen(FileSystem().create(temporary), "wb") as raw,
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
            raw.flush()
            os.fsync(raw.fileno())
        if not FileSystem().publish(temporary, target, replace=False):
            raise FileExistsError(f"{target} already exists")
    finally:
        FileSystem().remove(temporary)


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
        before = f"; the {counted(len(outcomes), 'file')} before it were read" if outcomes else ""
        raise ValueError(f"{source} is no tar file, or was cut off: {error}{before}") from error
    return outcomes


def _take(
    directory: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, size: int, progress: Callable[[int], object]
) -> str:
    name, saved_as = member.name.removesuffix(file_name("")), _NAME_FILE.fullmatch(member.name)
    if not saved_as and (not is_snapshot_name(name) or member.name != file_name(name)):
        return "refused: the file name is neither that of a snapshot nor that of a saved name"
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        return "refused: not a regular file"
    if member.offset_data + member.size > size:
        raise tarfile.ReadError(f"{name} should have {member.size} bytes, but the file ends before")
    stream = archive.extractfile(member)
    assert stream is not None  # a regular file has one
    if not saved_as:
        return _take_snapshot(directory, name, stream, progress)
    if member.size > MAX_BYTES:
        return f"refused: {member.size} bytes are more than the limit of {MAX_BYTES} for a saved name"
    return _take_name(directory, saved_as[1], stream.read())


def _take_snapshot(directory: Path, name: str, stream: IO[bytes], progress: Callable[[int], object]) -> str:
    files, temporary = FileSystem(), temporary_path(directory)
    try:
        with os.fdopen(files.create(temporary), "wb") as target:
            _copy(stream, target, progress)
            target.flush()
            os.fsync(target.fileno())
        with SnapshotFile(directory, name, temporary=temporary) as file:
            file.verify()
            header = file.header
        if header.parent and not _is_there(directory, header.parent, header.parent_uid):
            return "refused: the snapshot that it continues is missing, or is another one of the same name"
        replace = not _is_of_use(directory, name)
        return "imported" if files.publish(temporary, directory / header.file_name, replace) else "there already"
    finally:
        files.remove(temporary)


def _take_name(directory: Path, name: str, data: bytes) -> str:
    try:
        save = from_json(Save, data)
    except ValueError as error:
        return f"refused: {error}"
    if not save.is_of(_used(directory, save.snapshots)):
        return "refused: snapshots that it keeps are missing, or are not those that it names"
    names = Names(directory, FileSystem())
    if names.write(name, save, replace=False):
        return "imported"
    try:
        existing = names.read(name)
    except UnusableName as error:
        return f"refused: {error}"
    if replace(existing, saved=save.saved) != save:
        return f"refused: something else is saved as {name!r} here; forget that first"
    return "there already"


def _used(directory: Path, snapshots: Sequence[str]) -> list[FileHeader]:
    """Returns the chain of these snapshots, or an empty list if one is missing. Marks them as used now, so that no
    server evicts them before it sees the name that keeps them."""
    index = Index()
    for name in snapshots:
        try:
            header, status = read_header(directory, name)
            FileSystem().touch(directory / header.file_name, time.time())
        except (OSError, BadSnapshot):
            return []
        index.insert(header, status.st_mtime)
    return index.chain(snapshots[-1])


def _copy(source: IO[bytes], target: IO[bytes], progress: Callable[[int], object]) -> None:
    while data := source.read(COPY_BYTES):
        target.write(data)
        progress(len(data))


def _header(directory: Path, name: str) -> FileHeader | None:
    try:
        return read_header(directory, name)[0]
    except (OSError, BadSnapshot):
        return None


def _is_there(directory: Path, name: str, uid: str) -> bool:
    header = _header(directory, name)
    return header is not None and header.uid == uid


def _is_of_use(directory: Path, name: str) -> bool:
    header = _header(directory, name)
    return header is not None and (not header.parent or _is_there(directory, header.parent, header.parent_uid))
