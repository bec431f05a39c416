"""Arrays of a snapshot's layer: where each begins, its shape and its dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes that a field's offset is a multiple of."""

LAYER_ALIGNED = 256
"""Bytes that a layer's size is a multiple of."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip
"""Dtypes of fields, by name."""


@dataclass(frozen=True)
class SnapshotField:
    """One array of a layer: ``shape`` of ``dtype`` from byte ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in a layer."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def of(self, layer: Tensor) -> Tensor:
        """The array, [*shape], in a layer uint8 [layer_bytes] that begins at a multiple of 16 bytes."""
        return layer[self.offset : self.offset + self.nbytes].view(DTYPES[self.dtype]).view(self.shape)


def aligned(size: int, to: int) -> int:
    """``size``, or the next multiple of ``to``."""
    return -(-size // to) * to


def laid_out(arrays: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[tuple[SnapshotField, ...], int]:
    """Fields with these names, shapes and dtypes, one after the other, and the bytes of a layer that has them."""
    fields, offset = [], 0
    for name, shape, dtype in arrays:
        fields.append(SnapshotField(name, shape, str(dtype).removeprefix("torch."), offset))
        offset = aligned(offset + fields[-1].nbytes, ALIGNED)
    return tuple(fields), aligned(offset, LAYER_ALIGNED)
