"""Reads the header of a GGUF file; every count, length and offset is checked against the file's size before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from mmap import mmap
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

MAX_HEADER_BYTES = 1 << 26
"""Maximum size of a header. Real models' headers have up to 20 MB, nearly all of it tokens and merges."""

MAX_DIMENSIONS = 4
VERSIONS = (2, 3)
_MAGIC = b"GGUF"
_DTYPES: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}
_EMPTY_TEXT_BYTES = 8


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and position of a tensor in the file.

    Attributes:
        kind: encoding of the tensor's values.
        shape: rows first.
        start, stop: the byte range [start, stop) in the file.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class GGUFHeader:
    """``fields`` has the metadata by key; arrays of numbers are NumPy arrays. ``tensors`` has the tensors by name, in
    the file's order."""

    fields: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_header(data: mmap) -> GGUFHeader:
    """The header of a mapped file; raises ValueError if it is not a GGUF file, or contradicts itself."""
    cursor = _Cursor(data)
    if cursor.take(4, "the magic") != _MAGIC:
        raise ValueError(f"it does not start with the magic {_MAGIC.decode()}: this is not a GGUF file")
    version = cursor.number(4, "the version")
    if version and version & 0xFFFF == 0:
        raise ValueError("it is big-endian, which is not supported")
    if version not in VERSIONS:
        raise ValueError(f"GGUF version {version} is not supported; supported: {', '.join(map(str, VERSIONS))}")
    tensor_count = cursor.number(8, "the number of tensors")
    field_count = cursor.number(8, "the number of fields")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.text("the key of a field")
        if key in fields:
            raise ValueError(f"the field {key!r} occurs twice")
        fields[key] = cursor.value(cursor.kind(key), key)
    stated: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = cursor.text("the name of a tensor")
        if name in stated:
            raise ValueError(f"the tensor {name!r} occurs twice")
        stated[name] = cursor.tensor(name)
    alignment = fields.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment < MAX_HEADER_BYTES or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r} is not a power of two")
    return GGUFHeader(fields, _placed(stated, cursor.position, alignment, len(data)))


def _placed(
    stated: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]], header_bytes: int, alignment: int, size: int
) -> dict[str, TensorEntry]:
    """Returns the tensors' entries. Raises ValueError for tensors with incomplete blocks, and for those that are not
    aligned, reach past the end of the file, or overlap."""
    data_start = -(-header_bytes // alignment) * alignment
    entries = {}
    for name, (kind, shape, offset) in stated.items():
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"tensor {name!r} has rows of {shape[-1]}, not whole blocks of {block} as in {kind.name}")
        if offset % alignment:
            raise ValueError(f"tensor {name!r} starts at {offset}, which is not a multiple of {alignment}")
        start = data_start + offset
        stop = start + math.prod(shape) // block * block_bytes
        if stop > size:
            raise ValueError(f"tensor {name!r} reaches to byte {stop} of a file of {size}")
        entries[name] = TensorEntry(kind, shape, start, stop)
    in_order = sorted(entries.items(), key=lambda item: item[1].start)
    for (before, first), (name, second) in pairwise(in_order):
        if second.start < first.stop:
            raise ValueError(f"tensors {before!r} and {name!r} overlap")
    return entries


class _Cursor:
    """Reads values one after another, never past the end of the file or of ``MAX_HEADER_BYTES``."""

    def __init__(self, data: mmap) -> None:
        self.position = 0
        self._data, self._end = data, min(len(data), MAX_HEADER_BYTES)

    def _need(self, size: int, what: str) -> None:
        if size <= self._end - self.position:
            return
        if self._end == MAX_HEADER_BYTES:
            raise ValueError(f"the header has more than {MAX_HEADER_BYTES >> 20} MiB, at {what!r}")
        raise ValueError(
            f"it ends at byte {self._end}, inside {what!r}, which has {size} bytes from {self.position} on"
        )

    def take(self, size: int, what: str) -> bytes:
        """The next ``size`` bytes."""
        self._need(size, what)
        self.position += size
        return self._data[self.position - size : self.position]

    def number(self, size: int, what: str) -> int:
        """The next unsigned integer, of ``size`` bytes."""
        return int.from_bytes(self.take(size, what), "little")

    def text(self, what: str) -> str:
        """The next text."""
        try:
            return self.take(self.number(8, what), what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what!r} is not UTF-8") from error

    def kind(self, what: str) -> GGUFValueType:
        """The next value type."""
        number = self.number(4, what)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise ValueError(f"the field {what!r} is of the unknown type {number}") from error

    def value(self, kind: GGUFValueType, what: str) -> Any:
        """The next value, of type ``kind``."""
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind == GGUFValueType.ARRAY:
            return self._array(what)
        dtype = _DTYPES[kind]
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def _array(self, what: str) -> Any:
        kind, length = self.kind(what), self.number(8, what)
        if kind == GGUFValueType.ARRAY:
            raise ValueError(f"the field {what!r} is an array of arrays, which is not supported")
        if kind != GGUFValueType.STRING:
            dtype = _DTYPES[kind]
            return np.frombuffer(self.take(length * dtype.itemsize, what), dtype)
        self._need(length * _EMPTY_TEXT_BYTES, what)
        return [self.text(what) for _ in range(length)]

    def tensor(self, name: str) -> tuple[GGMLQuantizationType, tuple[int, ...], int]:
        """Type, shape (rows first) and offset of the next tensor. The tensor's name has been read already."""
        count = self.number(4, name)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {count} dimensions, not 1 to {MAX_DIMENSIONS}")
        dimensions = [self.number(8, name) for _ in range(count)]
        if not all(dimensions):
            raise ValueError(f"tensor {name!r} has a dimension of 0: {dimensions}")
        number = self.number(4, name)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ValueError(f"tensor {name!r} is of the unknown type {number}") from error
        return kind, tuple(reversed(dimensions)), self.number(8, name)
