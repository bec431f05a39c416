"""Sketches keys in one Triton kernel. It reads keys once and writes both planes directly into their pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.quantize_rows import MAX_DIMS
from shadowkv.ops.quantize_rows.triton import HEADS_AT_ONCE, WARPS
from shadowkv.ops.sign_scores.reference import LARGEST_SCALE, SCALE_SHIFT, STEP
from shadowkv.ops.sketch_queries.reference import plane_bytes
from shadowkv.ops.triton_sizes import TOKENS

SHIFT, LARGEST = tl.constexpr(SCALE_SHIFT), tl.constexpr(LARGEST_SCALE)
"""``SCALE_SHIFT`` and ``LARGEST_SCALE``, for kernels."""


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return unless(case.head_dim <= MAX_DIMS, f"head dim {case.head_dim} is above {MAX_DIMS}")


def sketch_keys(
    keys: Tensor,
    mean: Tensor,
    maps: Tensor,
    states: Tensor,
    signs: Tensor,
    rest: Tensor,
    scale: Tensor,
    pages: Tensor,
) -> None:
    """Same as the reference, for head dims up to 128. The last dimension of ``keys`` and the matrices in ``maps`` must
    be contiguous."""
    layers, count, _, heads, dim = keys.shape
    if dim > MAX_DIMS:
        raise ValueError(f"head dim {dim} is above {MAX_DIMS}, the maximum of sketch_keys in Triton")
    if not layers * count:
        return
    width = plane_bytes(dim)
    _sketch_keys[(count, layers, triton.cdiv(heads, HEADS_AT_ONCE))](
        keys, mean, maps, states, signs, rest, scale, pages,
        *keys.stride()[:4], *mean.stride()[:2], *maps.stride()[:2], signs.stride(0), signs.stride(1),
        scale.stride(0), scale.stride(1), SHARED=len(states) == 1, HEADS=heads, AT_ONCE=HEADS_AT_ONCE, DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim), WIDTH=width, BYTES=triton.next_power_of_2(width), STEP=STEP / dim**0.5,
        num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["states", "pages"])
def _sketch_keys(
    keys, mean, maps, states, signs, rest, scale, pages,
    key_layer, key_page, key_token, key_head, mean_layer, mean_state, map_layer, map_state,
    plane_layer, plane_page, scale_layer, scale_page,
    SHARED: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, BYTES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sketches some heads of one page of one layer. Column ``bit * BYTES + byte`` of the mapped tile is dimension bit *
    DIM / 8 + byte."""
    page, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column, token, dim = tl.arange(0, 8 * BYTES), tl.arange(0, TOKENS), tl.arange(0, DIM_BLOCK)
    used = (column % BYTES < DIM // 8)[None, :]
    entry = dim[:, None] * DIM + (column // BYTES * (DIM // 8) + column % BYTES)[None, :]
    page_id = tl.load(pages + page)
    state = tl.load(states) if SHARED else tl.load(states + page)
    byte, bit = tl.arange(0, BYTES)[None, :], tl.arange(0, 8)[None, :, None]
    plane = layer * plane_layer + page_id * plane_page + token[:, None] * WIDTH + byte
    scale_row = scale + layer * scale_layer + page_id * scale_page + token
    row = keys + layer * key_layer + page * key_page + token[:, None] * key_token + dim[None, :]
    centre_row = mean + layer * mean_layer + state * mean_state + dim
    map_of_state = maps + layer * map_layer + state * map_state + entry
    first = tl.program_id(2) * AT_ONCE
    for head in range(first, min(first + AT_ONCE, HEADS)):
        x = tl.load(row + head * key_head, mask=(dim < DIM)[None, :], other=0.0)
        centred = x.to(tl.float32) - tl.load(centre_row + head * DIM, mask=dim < DIM, other=0.0)[None, :]
        matrix = tl.load(map_of_state + head * DIM * DIM, mask=(dim < DIM)[:, None] & used, other=0.0)
        if x.dtype == tl.bfloat16:
            # A centred key has more bits than bfloat16, so it is split into the sum of two bfloat16 numbers.
            held = centred.to(tl.bfloat16)
            y = tl.dot((centred - held.to(tl.float32)).to(tl.bfloat16), matrix, tl.dot(held, matrix))
        else:
            y = tl.dot(centred, matrix.to(tl.float32), input_precision="ieee")
        square = tl.sum(y * y, 1)
        step = tl.maximum(STEP * tl.sqrt(square), 1e-37)
        code = tl.minimum(tl.maximum(tl.floor(y / step[:, None]) + 2, 0.0), 3.0)
        overlap = tl.sum(tl.where(used, y * (code - 1.5), 0.0), 1)
        length = square / tl.where(overlap > 0, overlap, 1.0)
        # Keys that are not finite give NaN, which is not above 0.
        length = tl.where((overlap > 0) & (length > 0), tl.minimum(length, LARGEST), 0.0)
        half = length.to(tl.float16).to(tl.int16, bitcast=True)
        tl.store(scale_row + head * TOKENS, tl.maximum(((half >> SHIFT - 1) + 1) >> 1, 1).to(tl.uint8))
        whole = tl.reshape(tl.where(used, code.to(tl.int32), 0), (TOKENS, 8, BYTES))
        # One sum computes both planes, the signs in the upper half.
        both = tl.sum((((whole >> 1) << 8) | (whole & 1)) << bit, 1)
        target = plane + head * TOKENS * WIDTH
        tl.store(signs + target, (both >> 8).to(tl.uint8), mask=byte < WIDTH)
        tl.store(rest + target, (both & 255).to(tl.uint8), mask=byte < WIDTH)
