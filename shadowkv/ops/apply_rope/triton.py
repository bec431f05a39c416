"""Rotary position embedding in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables

MANY = 2048
"""From this many tokens on, a program rotates several heads, and reads cosines and sines once for all of them. With
fewer tokens, a program rotates one head, so that there are more programs."""


def apply_rope(x: Tensor, positions: Tensor, rotary: RotaryTables, inverse: bool = False) -> Tensor:
    """Same as the reference. The last dimension must be contiguous."""
    rows, heads, dim = x.shape[:-2].numel(), x.shape[-2], x.shape[-1]
    flat, config = x.reshape(rows, heads, dim), rotary.config
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    # Flattened positions can still have stride 0, if one token's position is expanded to several layers.
    positions = positions.reshape(-1).contiguous()
    scale = 1 / config.magnitude**2 if inverse else 1.0
    tokens, together = (16, 4) if rows >= MANY else (2, 1)
    _apply_rope[(triton.cdiv(rows, tokens), triton.cdiv(heads, together))](
        flat, positions, rotary.cos, rotary.sin, out, rows, heads, flat.stride(0), flat.stride(1),
        scale, -scale if inverse else 1.0, TOKENS=tokens, HEADS=together,
        HALF=config.dim // 2, HALF_BLOCK=triton.next_power_of_2(config.dim // 2),
        DIM=dim, REST_BLOCK=triton.next_power_of_2(max(1, dim - config.dim)), INTERLEAVED=config.interleaved,
    )  # fmt: skip
    return out.view(x.shape)


@triton.jit(do_not_specialize=["rows", "heads"], do_not_specialize_on_alignment=["positions"])
def _apply_rope(
    x, positions, cos, sin, out, rows, heads, row_stride, head_stride, cos_scale, sin_scale, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, DIM: tl.constexpr, REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there, pair = (row < rows)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    lives = there & (pair < HALF)
    angle = tl.load(positions + row, mask=row < rows, other=0).to(tl.int64)[:, None] * HALF + pair
    c = tl.load(cos + angle, mask=lives, other=0.0) * cos_scale
    s = tl.load(sin + angle, mask=lives, other=0.0) * sin_scale
    first, second = (2 * pair, 2 * pair + 1) if INTERLEAVED else (pair, pair + HALF)
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    for head in range(tl.program_id(1) * HEADS, tl.minimum(tl.program_id(1) * HEADS + HEADS, heads)):
        source = x + row[:, None] * row_stride + head * head_stride
        target = out + (row[:, None] * heads + head) * DIM
        a = tl.load(source + first, mask=lives, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=lives, other=0.0).to(tl.float32)
        tl.store(target + first, (a * c - b * s).to(out.dtype.element_ty), mask=lives)
        tl.store(target + second, (b * c + a * s).to(out.dtype.element_ty), mask=lives)
        if 2 * HALF < DIM:
            kept = there & (rest < DIM)
            tl.store(target + rest, tl.load(source + rest, mask=kept), mask=kept)


@triton.jit
def rope_pair(
    source, cos, sin, position,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, cos_scale, sin_scale,
):  # fmt: skip
    """Rotates pairs of dimensions. Returns the offsets of the first and of the second dimension of each pair, their
    rotated values in float32, and a mask of the pairs that exist."""
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
