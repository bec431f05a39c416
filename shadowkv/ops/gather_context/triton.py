"""Gathers cached and new rows of packed sequences in one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.page import PAGE

ROWS = 16
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
    _gather_context[(triton.cdiv(rows, ROWS), heads)](
        rope_keys, values, k_pages, v_pages, sources, count, keys, gathered, rows, heads,
        *rope_keys.stride()[:2], *values.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
        DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), ROWS=ROWS, PAGE=PAGE,
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
