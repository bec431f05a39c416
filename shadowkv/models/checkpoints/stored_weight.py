"""A weight as files store it: plain numbers, 8-bit floats with scales, or blocks of quantised numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.quantise_tokens.reference import quantise_tokens
from shadowkv.ops.registry import choose

ROWS_AT_ONCE = 1024
"""Rows that are quantised at a time: their size in float32 is small compared with the weights."""


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
        numbers: Tensor = _dequantise()(stored.data, stored.form)
        return numbers
    return stored if isinstance(stored, Tensor) else stored.codes.float() * stored.scale


@cache
def _dequantise() -> Callable[..., Tensor]:
    """On the CPU, where weights are read, whatever an engine runs on."""
    return choose("dequantise_blocks", "cpu").function


@torch.no_grad()
def fill_quantised(weight: Tensor, scale: Tensor, stored: Stored) -> None:
    """Writes rows [N, K] of a projection and their scales [N, 1]: codes unchanged, other numbers quantised per row."""
    if isinstance(stored, FP8Weight):
        weight.copy_(stored.codes)
        scale.copy_(stored.scale)
        return
    numbers = dense(stored)
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        run = slice(start, start + ROWS_AT_ONCE)
        codes, scales = quantise_tokens(numbers[run].to(weight.device))
        weight[run].copy_(codes)
        scale[run].copy_(scales)
