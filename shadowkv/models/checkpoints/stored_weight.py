"""A weight as files store it: a plain tensor, or quantized rows."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.activation_rows.reference import quantize_tokens
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.registry import Choice, choose

NUMBERS_AT_ONCE = 2**22
"""How many numbers are dequantized or quantized at a time. In float32 they take 16 MiB, little compared with all
weights."""

FP8_ROWS = GroupForm("e4m3", None, torch.float32)
"""The form of weights in ``FP8Linear``."""

Stored = Tensor | QuantizedRows


def dense(stored: Stored) -> Tensor:
    """The unquantized weight, in float32 if it was quantized."""
    if isinstance(stored, Tensor):
        return stored
    numbers: Tensor = _dequantize(stored.tensors[0].device.type).function(stored)
    return numbers


@cache
def _dequantize(device: str) -> Choice:
    return choose("dequantize_rows", device)


@torch.no_grad()
def fill_plain(parameter: Tensor, stored: Stored) -> None:
    """Writes a weight's numbers into ``parameter``, on its device and in its dtype."""
    if isinstance(stored, Tensor):
        parameter.copy_(stored)
        return
    for rows, tile in stored.tiles(NUMBERS_AT_ONCE):
        parameter[rows].copy_(dense(tile.to(parameter.device)))


@torch.no_grad()
def fill_fp8(weight: Tensor, scale: Tensor, stored: Stored) -> None:
    """Writes N rows of K columns of a projection to ``weight`` [N, K], and their scales to ``scale`` [N, 1]. Codes that
    already have one scale per row are copied; other numbers are quantized per row."""
    if isinstance(stored, QuantizedRows) and stored.form == FP8_ROWS:
        weight.copy_(stored.tensors[0])
        scale.copy_(stored.tensors[1])
        return
    step = max(1, NUMBERS_AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        part = stored[rows].to(weight.device)
        codes, scales = quantize_tokens(dense(part))
        weight[rows].copy_(codes)
        scale[rows].copy_(scales)
