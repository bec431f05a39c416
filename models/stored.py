"""What files have of a weight: plain numbers, 8-bit floats with scales, or blocks of quantised numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from shadowkv.ops.registry import Ops


@dataclass(frozen=True)
class FP8Weight:
    """A weight as a file has it in 8-bit floats.

    Attributes:
        codes: float8_e4m3fn [N, K].
        scale: float32 [N, 1], or [1, 1] for all rows.
    """

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Blocks:
    """A weight as a GGUF file has it in blocks.

    Attributes:
        data: uint8 [N, bytes of a row].
        form: of the blocks, one of ``FORMATS``.
    """

    data: Tensor
    form: str


Stored = Tensor | FP8Weight | Blocks


def dense(stored: Stored) -> Tensor:
    """The weight as plain numbers, float32 where it was quantised."""
    if isinstance(stored, Blocks):
        numbers: Tensor = _ops().dequantise_blocks(stored.data, stored.form)
        return numbers
    return stored if isinstance(stored, Tensor) else stored.codes.float() * stored.scale


@cache
def _ops() -> Ops:
    return Ops("cpu")
