"""Copies rows into pages in Triton. A few thread blocks copy to host memory, so that the GPU stays free for other
work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.triton_sizes import TOKENS

BLOCKS = 16
"""Thread blocks that are enough to saturate the bus. 126 MB take 2.5 ms on an H200 with 16, 32 and 64 of them."""


def write_rows(rows: Tensor, field: Tensor, pages: Tensor, across_bus: bool) -> None:
    """Same as the reference. The last dimension of ``rows`` is contiguous, and so are all but the first two of
    ``field``."""
    if rows.dtype == torch.uint8 and all(_is_made_of_words(x) for x in (rows, field)):
        rows, field = rows.view(torch.int64), field.view(torch.int64)
    layers, count, _, heads, dim = rows.shape
    tiles = layers * count * heads
    if not tiles:
        return
    _write_rows[(min(tiles, BLOCKS) if across_bus else tiles,)](
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
