"""Copies of keys and values in Triton. Each is one kernel. ``append_block`` reads each key and value once. A few thread
blocks of ``write_rows`` copy to host memory, so that the GPU stays free for other work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.apply_rope.triton import rope_pair
from shadowkv.ops.page import PAGE
from shadowkv.ops.triton_sizes import TOKENS

BLOCK_TOKENS, TOGETHER = 16, 4
"""Tokens and heads per program. The heads share one read of cosines and sines."""


def append_block(
    k: Tensor, v: Tensor, positions: Tensor, rotary: RotaryTables, keys: Tensor, rope_keys: Tensor, values: Tensor
) -> None:
    """Same as the reference. The last dimension of every input, and the last two of every output, must be
    contiguous."""
    (tokens, heads, dim), config = k.shape, rotary.config
    if not tokens:
        return
    _append_block[(triton.cdiv(tokens, BLOCK_TOKENS), triton.cdiv(heads, TOGETHER))](
        k, v, positions.contiguous(), rotary.cos, rotary.sin, keys, rope_keys, values, tokens, heads,
        *k.stride()[:2], *v.stride()[:2], keys.stride(0), rope_keys.stride(0), values.stride(0),
        TOKENS=BLOCK_TOKENS, HEADS=TOGETHER, HALF=config.dim // 2, HALF_BLOCK=triton.next_power_of_2(config.dim // 2),
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


def append_tokens(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotary: RotaryTables,
    k_pages: Tensor,
    v_pages: Tensor,
    write_page: Tensor,
    write_offset: Tensor,
) -> None:
    """Same as the reference. The last dimension of every tensor must be contiguous."""
    batch, heads, dim = k.shape
    _append_tokens[(batch, heads)](
        k, v, positions, rotary.cos, rotary.sin, k_pages, v_pages, write_page, write_offset,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        HALF=rotary.config.dim // 2, HALF_BLOCK=triton.next_power_of_2(rotary.config.dim // 2),
        DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), INTERLEAVED=rotary.config.interleaved, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["positions", "write_page", "write_offset"])
def _append_tokens(
    k, v, positions, cos, sin, k_pages, v_pages, write_page, write_offset,
    k_row, k_head, v_row, v_head, page_stride, head_stride, token_stride,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page, offset = tl.load(write_page + row), tl.load(write_offset + row)
    target = page * page_stride + head * head_stride + offset * token_stride
    source = k + row * k_row + head * k_head
    first, second, one, other, lives = rope_pair(
        source, cos, sin, tl.load(positions + row), HALF, HALF_BLOCK, INTERLEAVED, 1.0, 1.0
    )
    tl.store(k_pages + target + first, one.to(k_pages.dtype.element_ty), mask=lives)
    tl.store(k_pages + target + second, other.to(k_pages.dtype.element_ty), mask=lives)
    dim = tl.arange(0, DIM_BLOCK)
    if 2 * HALF < DIM:
        rest = (dim >= 2 * HALF) & (dim < DIM)
        tl.store(k_pages + target + dim, tl.load(source + dim, mask=rest), mask=rest)
    value = tl.load(v + row * v_row + head * v_head + dim, mask=dim < DIM)
    tl.store(v_pages + target + dim, value, mask=dim < DIM)


GATHERED_ROWS = 16
"""Rows per program."""


def gather_context(
    rope_keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, sources: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference. The last dimension of every tensor must be contiguous. Rows that are not needed are not
    written."""
    (rows,), (_, heads, dim) = sources.shape, rope_keys.shape
    keys, gathered = (x.new_empty(rows, heads, dim) for x in (rope_keys, values))
    if not rows:
        return keys, gathered
    _gather_context[(triton.cdiv(rows, GATHERED_ROWS), heads)](
        rope_keys, values, k_pages, v_pages, sources, count, keys, gathered, rows, heads,
        *rope_keys.stride()[:2], *values.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
        DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), ROWS=GATHERED_ROWS, PAGE=PAGE,
    )  # fmt: skip
    return keys, gathered


@triton.jit(do_not_specialize=["rows", "heads"], do_not_specialize_on_alignment=["sources", "count"])
def _gather_context(
    rope_keys, values, k_pages, v_pages, sources, count, keys, gathered, rows, heads, key_row, key_head, value_row,
    value_head, k_page, k_page_head, k_page_row, v_page, v_page_head, v_page_row,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    needed = tl.minimum(tl.load(count), rows)
    if first >= needed:
        return
    row, dim = first + tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)[None, :]
    source = tl.load(sources + row, mask=row < needed, other=-1)[:, None]
    there = (row < needed)[:, None] & (dim < DIM)
    new, page, offset, token = source < 0, source // PAGE, source % PAGE, -1 - source
    out = (row.to(tl.int64)[:, None] * heads + head) * DIM + dim
    x = tl.load(rope_keys + token * key_row + head * key_head + dim, mask=there & new, other=0.0)
    y = tl.load(
        k_pages + page * k_page + head * k_page_head + offset * k_page_row + dim, mask=there & (source >= 0), other=0.0
    )
    tl.store(keys + out, tl.where(new, x, y), mask=there)
    x = tl.load(values + token * value_row + head * value_head + dim, mask=there & new, other=0.0)
    y = tl.load(
        v_pages + page * v_page + head * v_page_head + offset * v_page_row + dim, mask=there & (source >= 0), other=0.0
    )
    tl.store(gathered + out, tl.where(new, x, y), mask=there)


BUS_BLOCKS = 16
"""Thread blocks that are enough to saturate the bus. 126 MB take 2.5 ms on an H200 with 16, 32 and 64 of them."""


def write_rows(rows: Tensor, field: Tensor, pages: Tensor, across_bus: bool) -> None:
    """Same as the reference. The last dimension of ``rows`` is contiguous. In ``field``, all dimensions but the first
    two are contiguous."""
    if rows.dtype == torch.uint8 and all(_is_made_of_words(x) for x in (rows, field)):
        rows, field = rows.view(torch.int64), field.view(torch.int64)
    layers, count, _, heads, dim = rows.shape
    tiles = layers * count * heads
    if not tiles:
        return
    _write_rows[(min(tiles, BUS_BLOCKS) if across_bus else tiles,)](
        rows, field, pages, *rows.stride()[:4], field.stride(0), field.stride(1), count, tiles,
        HEADS=heads, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim),
    )  # fmt: skip


def _is_made_of_words(x: Tensor) -> bool:
    """Whether rows of bytes consist of 8-byte words. Rows of 48 bytes, copied byte by byte, would not saturate the
    bus."""
    lengths = (x.shape[-1], x.storage_offset(), x.data_ptr(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(length % 8 == 0 for length in lengths)


@triton.jit(do_not_specialize=["count", "tiles"], do_not_specialize_on_alignment=["pages"])
def _write_rows(
    rows, field, pages, row_layer, row_page, row_token, row_head, field_layer, field_page, count, tiles,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    token, dim = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head = tile % HEADS
        page = (tile // HEADS % count).to(tl.int64)
        layer = (tile // HEADS // count).to(tl.int64)
        source = rows + layer * row_layer + page * row_page + head * row_head
        target = field + layer * field_layer + tl.load(pages + page) * field_page + head * (TOKENS * DIM)
        x = tl.load(source + token * row_token + dim, mask=dim < DIM)
        tl.store(target + token * DIM + dim, x, mask=dim < DIM)
