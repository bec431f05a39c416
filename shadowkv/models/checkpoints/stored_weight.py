"""A weight as files store it: plain numbers, 8-bit floats with scales, or blocks of quantised numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from shadowkv.ops.registry import Ops


@dataclass(frozen=True)
class FP8Weight:
    """A weight stored in 8-bit floats.

    Attributes:
        codes: float8_e4m3fn [N, K].
        scale: float32 [N, 1], or [1, 1] for all rows.
    """

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Blocks:
    """A weight stored in the blocks of a GGUF file.

    Attributes:
        data: uint8 [N, bytes of a row].
        form: format of the blocks, one of ``FORMATS``.
    """

    data: Tensor
    form: str


Stored = Tensor | FP8Weight | Blocks


def dense(stored: Stored) -> Tensor:
    """The weight as plain numbers, in float32 if it was quantised."""
    if isinstance(stored, Blocks):
        numbers: Tensor = _ops().dequantise_blocks(stored.data, stored.form)
        return numbers
    return stored if isinstance(stored, Tensor) else stored.codes.float() * stored.scale


@cache
def _ops() -> Ops:
    return Ops("cpu")
