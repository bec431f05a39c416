"""A GGUF file: its metadata as plain values, and its tensors by name, read on request."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gguf.quants import dequantize, quant_shape_to_byte_shape
from torch import Tensor

from shadowkv.models.checkpoints.files import ModelFileError, check_regular, naming
from shadowkv.models.checkpoints.quantized.fp4 import MXFP4, fp4_rows
from shadowkv.models.checkpoints.reading import read_bytes
from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.models.gguf.header import read_header
from shadowkv.ops.quantized.blocks import BLOCKS
from shadowkv.ops.quantized.rows import Form, QuantizedRows

T = TypeVar("T")

_FORMS: dict[str, Form] = {**BLOCKS, "MXFP4": MXFP4}
"""Forms by ggml's type names. MXFP4's blocks are converted to the layout of safetensors files."""


class GGUFFile:
    """Read access to one file, whose tensors are read on request, on any thread.

    Args:
        path: the file. Raises FileNotFoundError if it is missing, ModelFileError if it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        check_regular(path)
        self.path = path
        with path.open("rb") as opened:
            if not path.stat().st_size:
                raise ModelFileError(path, "it is empty")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data, naming(path):
                self._header = read_header(data)
        with naming(path):
            architecture = self.get("general.architecture", str)
            if architecture is None:
                raise ValueError("general.architecture is missing, so the architecture is unknown")
        self.architecture: str = architecture

    def get(self, key: str, kind: type[T]) -> T | None:
        """Metadata value of ``key``, in which ``{arch}`` stands for the architecture. None if the file has no such key.

        Raises ModelFileError if the value is not of type ``kind``.
        """
        value = self.value(key)
        if value is None or type(value) is kind:
            return value
        raise ModelFileError(self.path, f"{self.key(key)}={_short(value)} is not a value of type {kind.__name__}")

    def list_of(self, key: str, *kinds: type, length: int | None = None) -> list[Any]:
        """Metadata array of ``key``, in which ``{arch}`` stands for the architecture. Raises ModelFileError if the
        array is missing, has entries of types other than ``kinds``, or does not have ``length`` entries."""
        value = self.value(key)
        if value is None:
            raise ModelFileError(self.path, f"{self.key(key)} is missing")
        if not isinstance(value, list) or not all(type(item) in kinds for item in value):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ModelFileError(self.path, f"{self.key(key)}={_short(value)} is not a list of {names}")
        if length is not None and len(value) != length:
            raise ModelFileError(self.path, f"{self.key(key)} has {len(value)} entries, not {length}")
        return value

    def value(self, key: str) -> Any:
        """Metadata value of ``key``, whatever its type; None if the file has no such key. Arrays become lists."""
        value = self._header.fields.get(self.key(key))
        return value.tolist() if isinstance(value, np.ndarray) else value

    def key(self, key: str) -> str:
        """``key`` with the file's architecture in place of ``{arch}``."""
        return key.replace("{arch}", getattr(self, "architecture", ""))

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the file's order."""
        return list(self._header.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first; raises ModelFileError if there is none with that name."""
        if name not in self._header.tensors:
            raise ModelFileError(self.path, f"the tensor {name} is missing")
        return self._header.tensors[name].shape

    def form(self, name: str) -> Form | None:
        """Form in which ``stored`` returns a matrix, or the matrices of all experts. None if ``stored`` returns the
        tensor as plain numbers."""
        kind = self._header.tensors[name].kind.name
        return _FORMS.get(kind) if len(self.shape(name)) in (2, 3) else None

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        entry = self._header.tensors[name]
        return entry.stop - entry.start

    def stored(self, name: str, *, pinned: bool = False) -> Stored:
        """Reads a tensor in its ``form``, in pinned memory if ``pinned``. The rows of experts follow one another. A
        tensor without a form is returned as ``tensor`` returns it. Raises what ``tensor`` raises."""
        shape, form, entry = self.shape(name), self.form(name), self._header.tensors[name]
        if form is None:
            return self.tensor(name)
        in_blocks = form is not MXFP4
        blocks = read_bytes(self.path, entry.start, entry.stop, pinned=pinned and in_blocks).view(prod(shape[:-1]), -1)
        return QuantizedRows((blocks,), form) if in_blocks else _from_mxfp4(blocks, pinned)

    def tensor(self, name: str) -> Tensor:
        """A tensor dequantized to float32, rows first. Raises ModelFileError for types without a decoder."""
        shape, entry = self.shape(name), self._header.tensors[name]
        raw = read_bytes(self.path, entry.start, entry.stop).numpy()
        try:
            # No warnings: weights can have any bits, and NaN is not an error of the file's format.
            with np.errstate(all="ignore"):
                values = dequantize(raw.reshape(quant_shape_to_byte_shape(shape, entry.kind)), entry.kind)
        except NotImplementedError as error:
            reason = f"the tensor {name} is of type {entry.kind.name}, which cannot be read"
            raise ModelFileError(self.path, reason, "use a file with another type, such as Q8_0") from error
        return torch.from_numpy(np.asarray(values, dtype=np.float32)).reshape(shape)


def _from_mxfp4(blocks: Tensor, pinned: bool) -> QuantizedRows:
    """Converts MXFP4 blocks, uint8 [N, K / 32 * 17], to N rows of K numbers. A block has a byte for the exponent and 16
    bytes for 32 numbers. The low halves of the bytes have the first 16 numbers, the high halves the other 16. In the
    result, as in other files, each byte has two neighbouring numbers."""
    blocks = blocks.view(len(blocks), -1, 17)
    codes = torch.empty(*blocks.shape[:2], 2, 8, dtype=torch.uint8, pin_memory=pinned)
    for half in range(2):
        numbers = blocks[..., 1:] >> 4 * half & 15
        torch.bitwise_or(numbers[..., ::2], numbers[..., 1::2] << 4, out=codes[:, :, half])
    return fp4_rows(MXFP4, codes.flatten(1), blocks[..., 0].contiguous())


def _short(value: Any) -> str:
    return repr(value[:3] if isinstance(value, Sequence) else value)
