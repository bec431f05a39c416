"""Rotary position embedding in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.rotate.tables import RotaryTables


def rotate(x: Tensor, positions: Tensor, rotary: RotaryTables, inverse: bool = False) -> Tensor:
    """As the reference; the last dimension must be dense."""
    rows, heads, dim = x.shape[:-2].numel(), x.shape[-2], x.shape[-1]
    flat, config = x.reshape(rows, heads, dim), rotary.config
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    scale = 1 / config.magnitude**2 if inverse else 1.0
    _rotate[(rows, heads)](
        flat, positions.reshape(-1), rotary.cos, rotary.sin, out, flat.stride(0), flat.stride(1),
        scale, -scale if inverse else 1.0, HEADS=heads,
        HALF=config.dim // 2, HALF_BLOCK=triton.next_power_of_2(config.dim // 2),
        DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), INTERLEAVED=config.interleaved, num_warps=1,
    )  # fmt: skip
    return out.view(x.shape)


@triton.jit
def _rotate(
    x, positions, cos, sin, out, row_stride, head_stride, cos_scale, sin_scale, HEADS: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = x + row * row_stride + head * head_stride
    target = out + (row * HEADS + head) * DIM
    first, second, turned, other, lives = rotated_pair(
        source, cos, sin, tl.load(positions + row), HALF, HALF_BLOCK, INTERLEAVED, cos_scale, sin_scale
    )
    tl.store(target + first, turned.to(out.dtype.element_ty), mask=lives)
    tl.store(target + second, other.to(out.dtype.element_ty), mask=lives)
    if 2 * HALF < DIM:
        dim = tl.arange(0, DIM_BLOCK)
        rest = (dim >= 2 * HALF) & (dim < DIM)
        tl.store(target + dim, tl.load(source + dim, mask=rest), mask=rest)


@triton.jit
def rotated_pair(
    source, cos, sin, position,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, cos_scale, sin_scale,
):  # fmt: skip
    """Offsets of both members of every pair, their rotated values in float32, and which pairs there are."""
    pair = tl.arange(0, HALF_BLOCK)
    lives = pair < HALF
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    a, b = (tl.load(source + first, mask=lives).to(tl.float32), tl.load(source + second, mask=lives).to(tl.float32))
    angle = position.to(tl.int64) * HALF + pair
    c = tl.load(cos + angle, mask=lives) * cos_scale
    s = tl.load(sin + angle, mask=lives) * sin_scale
    return first, second, a * c - b * s, b * c + a * s, lives
