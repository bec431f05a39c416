"""RoPE and scatter of new tokens in one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.apply_rope.triton import rope_pair


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
