"""Quantised rows in one Triton kernel: rows are read once, codes written straight into their pages.

The rotation runs on tensor cores, exactly enough that codes agree with float32 arithmetic: its entries are sums of two
bfloat16 numbers, which hold 17 bits, and the rows' products with both are exact. 61440 tokens of 8 heads take 0.17 ms
in 4 bits on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shadowkv.ops.case import Case
from shadowkv.ops.codec import UNIFORM, RowCodec, UniformRows, unknown_codecs

MOST_DIMS = 128
"""Wider rotations do not fit into shared memory beside the rows."""

HEADS_AT_ONCE, WARPS = 4, 4
"""Heads of a page that share a thread block and the rotation that it holds, and the block's warps: the fastest on an
H200, where twice the warps take twice the time."""

_arranged: WeakIdKeyDictionary = WeakIdKeyDictionary()


def arranged(rotation: Tensor, sources: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Columns ``sources`` of a rotation, zeros for -1, with rows of zeros up to a power of two.

    Returns:
        bfloat16 [2, K, columns], which add up to them, and float32 [K, columns]. Kept as long as the rotation is.
    """
    known = _arranged.setdefault(rotation, {})
    if sources not in known:
        dim = rotation.shape[0]
        index = torch.tensor(sources, device=rotation.device)
        exact = rotation.new_zeros(triton.next_power_of_2(dim), len(sources))
        exact[:dim] = torch.where(index >= 0, rotation[:, index.clamp(min=0)], 0)
        near = exact.bfloat16()
        known[sources] = torch.stack((near, (exact - near.float()).bfloat16())), exact
    return known[sources]


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    reasons = unknown_codecs(case.key_codec, case.value_codec)
    if case.head_dim > MOST_DIMS:
        reasons.append(f"head dim {case.head_dim} is more than {MOST_DIMS}")
    return reasons


def quantise_rows(
    rows: Tensor,
    codec: RowCodec,
    rotation: Tensor | None,
    state: tuple[Tensor, ...],
    codes: Tensor,
    code_pages: Tensor,
    scale: Tensor,
    scale_pages: Tensor,
) -> None:
    """As the reference, for rotated rows in equal steps of up to 128 dimensions, the last of which is dense.

    Raises:
        ValueError: another codec, or more dimensions.
    """
    layers, pages, _, heads, dim = rows.shape
    if codec.id not in UNIFORM or not isinstance(codec, UniformRows) or rotation is None:
        raise ValueError(f"quantise_rows in Triton does not know codec {codec.name!r} ({codec.id})")
    if dim > MOST_DIMS:
        raise ValueError(f"quantise_rows in Triton takes rows of up to {MOST_DIMS} dimensions, not {dim}")
    codec.check(dim)
    if not layers * pages:
        return
    per = codec.row_multiple // 8
    run = dim // 8 // per
    block = triton.next_power_of_2(run)
    # Dimensions in the order of their places within a byte, then of the bytes: 8 lanes of ``run``.
    sources = tuple(
        8 * (per * byte + place) + lane if byte < run else -1
        for place in range(per) for lane in range(8) for byte in range(block)
    )  # fmt: skip
    parts, exact = arranged(rotation, sources)
    _quantise_rows[(pages, layers, triton.cdiv(heads, HEADS_AT_ONCE))](
        rows, parts, exact, codes, code_pages, scale, scale_pages,
        *rows.stride()[:4], codes.stride(0), codes.stride(1), scale.stride(0), scale.stride(1),
        HEADS=heads, AT_ONCE=HEADS_AT_ONCE, DIM=dim, DIM_BLOCK=exact.shape[0], BITS=codec.bits,
        STEP=codec.step / dim**0.5, PER=per, RUN=run, RUN_BLOCK=block, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def rotate_rows(x, near, far, exact):
    """``x @ rotation`` in float32, of rows in bfloat16 or any other dtype."""
    if x.dtype == tl.bfloat16:
        y = tl.dot(x, far)
        return tl.dot(x, near, y)
    else:
        return tl.dot(x.to(tl.float32), exact, input_precision="ieee")


@triton.jit
def _quantise_rows(
    rows, parts, exact, codes, code_pages, scale, scale_pages,
    row_layer, row_page, row_token, row_head, code_layer, code_page, scale_layer, scale_page,
    HEADS: tl.constexpr, AT_ONCE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BITS: tl.constexpr,
    STEP: tl.constexpr, PER: tl.constexpr, RUN: tl.constexpr, RUN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Some heads of one page of one layer. ``PER`` codes share a byte of the narrowest plane, whose 8 lanes have
    ``RUN`` bytes each; they are a multiple of ``BYTES`` columns of the rotated tile apart."""
    page, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    BYTES: tl.constexpr = 8 * RUN_BLOCK
    WIDTH: tl.constexpr = DIM * BITS // 8
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    column, token, dim = tl.arange(0, PER * BYTES), tl.arange(0, 64), tl.arange(0, DIM_BLOCK)
    used = (column % RUN_BLOCK < RUN)[None, :]
    entry = dim[:, None] * (PER * BYTES) + column[None, :]
    matrix = tl.load(exact + entry)
    near, far = matrix, matrix
    if rows.dtype.element_ty == tl.bfloat16:
        near, far = tl.load(parts + entry), tl.load(parts + DIM_BLOCK * PER * BYTES + entry)
    place, byte = tl.arange(0, PER)[None, :, None], tl.arange(0, BYTES)[None, :]
    lane, within = byte // RUN_BLOCK, byte % RUN_BLOCK
    code_row = codes + layer * code_layer + tl.load(code_pages + page) * code_page + token[:, None] * WIDTH
    scale_row = scale + layer * scale_layer + tl.load(scale_pages + page) * scale_page + token
    row = rows + layer * row_layer + page * row_page + token[:, None] * row_token + dim[None, :]
    first = tl.program_id(2) * AT_ONCE
    for head in range(first, min(first + AT_ONCE, HEADS)):
        x = tl.load(row + head * row_head, mask=(dim < DIM)[None, :], other=0.0)
        y = rotate_rows(x, near, far, matrix)
        step = STEP * tl.sqrt(tl.sum(y * y, 1))
        level = tl.floor(y / tl.where(step == 0, 1.0, step)[:, None])
        level = tl.minimum(tl.maximum(level, -MIDDLE), MIDDLE - 1)
        centre = tl.where(used, level + 0.5, 0.0)
        tl.store(scale_row + head * 64, (tl.sum(y * centre, 1) / tl.sum(centre * centre, 1)).to(tl.float16))
        code = tl.reshape((level + MIDDLE).to(tl.int32), (64, PER, BYTES))
        target = code_row + head * 64 * WIDTH
        if BITS == 3:
            # The plane of the lower two bits has two bytes where that of the upper ones, behind it, has one.
            low = tl.sum(tl.where(place < 4, (code & 3) << (2 * place), 0), 1)
            high = tl.sum(tl.where(place >= 4, (code & 3) << (2 * (place - 4)), 0), 1)
            at = lane * (2 * RUN) + 2 * within
            tl.store(target + at, low.to(tl.uint8), mask=within < RUN)
            tl.store(target + at + 1, high.to(tl.uint8), mask=within < RUN)
            packed = tl.sum((code >> 2) << place, 1)
            target += DIM // 4
        else:
            packed = tl.sum(code << (BITS * place), 1)
        tl.store(target + lane * RUN + within, packed.to(tl.uint8), mask=within < RUN)
