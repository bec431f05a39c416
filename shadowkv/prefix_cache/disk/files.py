"""Writes and reads snapshots' files. A file is written under a temporary name and renamed when it is complete. Its
checksums are verified when it is read.

``<name>.safetensors`` has a header (``header.py``), the bytes of all layers, and the ids of the snapshot's tokens.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import xxhash

from shadowkv.prefix_cache.disk.filesystem import FileSystem, NewFile, Workers
from shadowkv.prefix_cache.disk.header import BadSnapshot, FileHeader, decode, encode, file_name, header_bytes
from shadowkv.prefix_cache.page_hashes import TokenIds, id_bytes

READ_BLOCK = 4 * 2**20
"""Bytes per read. They are enough to keep a disk busy, and few enough that the checksum reads them from the CPU's
cache."""

Buffer: TypeAlias = memoryview | bytearray | bytes | npt.NDArray[Any]


class SnapshotGone(Exception):
    """A file is gone, or another file has its name now. This is an ordinary miss."""


def write_snapshot(
    directory: Path,
    header: FileHeader,
    token_ids: TokenIds,
    slabs: Iterable[Buffer],
    *,
    replace_existing: Callable[[], bool] = lambda: False,
    go_on: Callable[[], bool] = lambda: True,
    files: FileSystem | None = None,
) -> FileHeader | None:
    """Writes a file. Returns its header with the checksums, or None if a file with its name exists and stays.

    ``slabs`` are the bytes of all layers in order, split anywhere. The next slab is requested only after the previous
    one was used. ``go_on`` is called before each slab, and returns whether to continue. ``replace_existing`` is called
    when the file is complete, and returns whether to replace a file with the same name.

    Raises OSError if the file cannot be written, InterruptedError if ``go_on`` returns False, and ValueError if data or
    ids do not match ``header``. After an error the file is removed.
    """
    files = files or FileSystem()
    ids = id_bytes(token_ids)
    if len(ids) != 4 * header.tokens:
        raise ValueError(f"{len(ids) // 4} token ids for tokens {header.start} to {header.length}")
    begin = len(encode(header))
    with NewFile(directory, files) as file:
        files.reserve(file.descriptor, header.file_bytes)
        checksum, offset, end = xxhash.xxh3_128(), begin, begin + header.nbytes
        for slab in slabs:
            if not go_on():
                raise InterruptedError(f"{header.name} was given up")
            data = as_bytes(slab)
            if offset + len(data) > end:
                raise ValueError(f"more data than {header.nbytes} bytes")
            checksum.update(data)
            file.write(data, offset)
            offset += len(data)
        if offset != end:
            raise ValueError(f"{offset - begin} bytes of data instead of {header.nbytes}")
        file.write(ids, end)
        header = replace(header, checksum=checksum.hexdigest(), token_checksum=xxhash.xxh3_128_hexdigest(ids))
        file.write(encode(header), 0)
        return header if file.publish(directory / header.file_name, replace_existing) else None


def as_bytes(buffer: Buffer) -> memoryview:
    """Returns the bytes of a buffer, without copying. Raises ValueError or TypeError if they are not contiguous."""
    view: memoryview[Any] = memoryview(cast(Any, buffer))  # NumPy's types do not declare arrays as buffers
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class SnapshotFile:
    """A file open for reading. Its bytes stay readable even if the name is removed or replaced. ``temporary`` is the
    path of a file that is not published yet.

    The constructor raises FileNotFoundError, other OSErrors, and BadSnapshot if the header is wrong. Methods raise
    OSError and BadSnapshot.
    """

    def __init__(
        self, directory: Path, name: str, files: FileSystem | None = None, *, temporary: Path | None = None
    ) -> None:
        self._files = files or FileSystem()
        self.path = temporary or directory / file_name(name)
        self._descriptor = self._files.open(self.path)
        try:
            self.status = os.fstat(self._descriptor)
            if not stat.S_ISREG(self.status.st_mode):
                raise BadSnapshot(self.path, "not a regular file")
            prefix = self._read(0, 8)
            self._begin = header_bytes(self.path, prefix, self.status.st_size)
            self.header: FileHeader = decode(
                self.path, name, prefix + self._read(8, self._begin - 8), self.status.st_size
            )
        except BaseException:
            os.close(self._descriptor)
            raise

    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The ids of the snapshot's tokens."""
        raw = self._read(self._begin + self.header.nbytes, 4 * self.header.tokens)
        if xxhash.xxh3_128_hexdigest(raw) != self.header.token_checksum:
            raise BadSnapshot(self.path, "its token ids do not match their checksum")
        return np.frombuffer(raw, "<u4")

    def expect(self, token_ids: TokenIds) -> None:
        """Raises BadSnapshot if the file has other tokens than ``token_ids``. Raises ValueError if the number of
        ``token_ids`` is wrong."""
        ids = id_bytes(token_ids)
        if len(ids) != 4 * self.header.tokens:
            raise ValueError(f"{len(ids) // 4} token ids for tokens {self.header.start} to {self.header.length}")
        if self.token_ids().tobytes() != ids:
            raise BadSnapshot(self.path, "it holds other tokens")

    def read_into(self, buffers: Sequence[Buffer], readers: Workers | None = None) -> None:
        """Fills ``buffers`` with the data of all layers. ``readers`` read its blocks in parallel; if None, blocks are
        read one by one.

        Raises ValueError if the buffers and the data differ in size. After an error the buffers' contents are invalid.
        Buffers are never written to after the call has returned.
        """
        blocks, offset = [], self._begin
        for view in map(as_bytes, buffers):
            for begin in range(0, len(view), READ_BLOCK):
                blocks.append((view[begin : begin + READ_BLOCK], offset + begin))
            offset += len(view)
        if offset != self._begin + self.header.nbytes:
            raise ValueError(f"buffers of {offset - self._begin} bytes for {self.header.nbytes} of data")
        checksum = xxhash.xxh3_128()
        if readers is None:
            for block, at in blocks:
                self._fill(block, at)
                checksum.update(block)
        else:
            reads: list[Future[None]] = [readers.submit(self._fill, block, at) for block, at in blocks]
            try:
                for read, (block, _) in zip(reads, blocks):
                    read.result()
                    checksum.update(block)
            finally:
                for read in reads:
                    read.cancel()
                wait(reads)
        if checksum.hexdigest() != self.header.checksum:
            raise BadSnapshot(self.path, "its data does not match the checksum")

    def verify(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Reads all bytes and checks them. ``progress`` is called with byte counts."""
        self.token_ids()
        checksum, block = xxhash.xxh3_128(), memoryview(bytearray(min(READ_BLOCK, self.header.nbytes)))
        for begin in range(0, self.header.nbytes, READ_BLOCK):
            part = block[: self.header.nbytes - begin]
            self._fill(part, self._begin + begin)
            checksum.update(part)
            progress(len(part))
        if checksum.hexdigest() != self.header.checksum:
            raise BadSnapshot(self.path, "its data does not match the checksum")

    def stream(self) -> BinaryIO:
        """Returns a separate file object that reads the file from its first byte on."""
        return os.fdopen(os.dup(self._descriptor), "rb")

    def _read(self, offset: int, size: int) -> bytes:
        raw = bytearray(size)
        self._fill(memoryview(raw), offset)
        return bytes(raw)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            count = self._files.read(self._descriptor, buffer, offset)
            if not count:
                raise BadSnapshot(self.path, f"cut off after {offset} bytes")
            buffer, offset = buffer[count:], offset + count

    def is_current(self) -> bool:
        """Whether the file's name still refers to these bytes."""
        try:
            status = self._files.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.status.st_dev, self.status.st_ino)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._descriptor)

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
