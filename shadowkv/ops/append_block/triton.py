"""Copies keys and values of a prompt block in one Triton kernel. It reads each key and value once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables

TOKENS, TOGETHER = 16, 4
"""Tokens and heads per program. The heads share one read of cosines and sines."""


def append_block(
    k: Tensor, v: Tensor, positions: Tensor, rotary: RotaryTables, keys: Tensor, rope_keys: Tensor, values: Tensor
) -> None:
    """Same as the reference. The last dimension of every input, and the last two of every output, must be
    contiguous."""
    (tokens, heads, dim), config = k.shape, rotary.config
    if not tokens:
        return
    _append_block[(triton.cdiv(tokens, TOKENS), triton.cdiv(heads, TOGETHER))](
        k, v, positions.contiguous(), rotary.cos, rotary.sin, keys, rope_keys, values, tokens, heads,
        *k.stride()[:2], *v.stride()[:2], keys.stride(0), rope_keys.stride(0), values.stride(0),
        TOKENS=TOKENS, HEADS=TOGETHER, HALF=config.dim // 2, HALF_BLOCK=triton.next_power_of_2(config.dim // 2),
        DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), REST_BLOCK=triton.next_power_of_2(max(1, dim - config.dim)),
        INTERLEAVED=config.interleaved,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "heads"], do_not_specialize_on_alignment=["positions"])
def _append_block(
    k, v, positions, cos, sin, keys, rope_keys, values, tokens, heads, k_token, k_head, v_token, v_head, key_token,
    rope_token, value_token, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there, pair, dim = (row < tokens)[:, None], tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, DIM_BLOCK)[None, :]
    lives = there & (pair < HALF)
    angle = tl.load(positions + row, mask=row < tokens, other=0).to(tl.int64)[:, None] * HALF + pair
    c, s = tl.load(cos + angle, mask=lives, other=0.0), tl.load(sin + angle, mask=lives, other=0.0)
    first, second = (2 * pair, 2 * pair + 1) if INTERLEAVED else (pair, pair + HALF)
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    for head in range(tl.program_id(1) * HEADS, tl.minimum(tl.program_id(1) * HEADS + HEADS, heads)):
        source, within = k + row[:, None] * k_token + head * k_head, head * DIM
        plain, rope = keys + row[:, None] * key_token + within, rope_keys + row[:, None] * rope_token + within
        a, b = tl.load(source + first, mask=lives, other=0.0), tl.load(source + second, mask=lives, other=0.0)
        tl.store(plain + first, a, mask=lives)
        tl.store(plain + second, b, mask=lives)
        a, b = a.to(tl.float32), b.to(tl.float32)
        tl.store(rope + first, (a * c - b * s).to(rope_keys.dtype.element_ty), mask=lives)
        tl.store(rope + second, (b * c + a * s).to(rope_keys.dtype.element_ty), mask=lives)
        if 2 * HALF < DIM:
            kept = there & (rest < DIM)
            x = tl.load(source + rest, mask=kept)
            tl.store(plain + rest, x, mask=kept)
            tl.store(rope + rest, x, mask=kept)
        mine = there & (dim < DIM)
        x = tl.load(v + row[:, None] * v_token + head * v_head + dim, mask=mine)
        tl.store(values + row[:, None] * value_token + within + dim, x, mask=mine)
