"""Quantises rows to float8_e4m3fn in one Triton kernel, with a program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.quantise_tokens.reference import FP8, MIN_SCALE, STEP


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Same as the reference. The last dimension must be contiguous."""
    rows, size = x.shape
    codes = torch.empty(rows, size, dtype=FP8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantise_tokens[(rows,)](
        x, codes, scale, x.stride(0), STEP, MIN_SCALE, SIZE=size, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return codes, scale


@triton.jit
def _quantise_tokens(x, codes, scale, row_stride, step, least, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    lives = column < SIZE
    wide = tl.load(x + row * row_stride + column, mask=lives, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=0) * step, least)
    tl.store(scale + row, largest)
    # Codes are rounded here, so that the conversion is exact: Triton's interpreter loses the carry when it rounds.
    # Adding and subtracting a large number leaves three bits of mantissa, or multiples of 2^-9.
    code = wide * tl.div_rn(1.0, largest)
    power = (tl.maximum(tl.abs(code), 0.015625).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    code = (code + 1572864.0 * power) - 1572864.0 * power
    tl.store(codes + row * SIZE + column, code.to(codes.dtype.element_ty), mask=lives)
