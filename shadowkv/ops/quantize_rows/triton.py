"""Encodes rows in Triton kernels. They read rows once and write codes directly into their pages.

Tensor cores compute the product with the codec's rotation precisely enough that codes agree with float32 arithmetic. An
entry of the rotation is split into two bfloat16 numbers, which together hold 17 bits. Their products with bfloat16 rows
are exact. Rows of other dtypes are multiplied in three products of TensorFloat-32 (Triton's ``tf32x3``). 61440 tokens
of 8 heads take 0.17 ms on an H200, in 4 bits with equal steps.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shadowkv.ops.case import Case
from shadowkv.ops.codec import LANES, CodecId, LevelRows, RowCodec, UniformRows, unknown_codecs
from shadowkv.ops.quantize_rows import MAX_DIMS, ROTATED_IN_KERNELS
from shadowkv.ops.triton_sizes import TOKENS

HEADS_AT_ONCE, WARPS = 4, 4
"""Heads of a page that a thread block encodes, and warps per block. The heads share the rotation that the block holds.
This choice is the fastest on an H200. Twice the warps take twice the time there."""

_arranged: WeakIdKeyDictionary = WeakIdKeyDictionary()
_levels: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor, Tensor]] = {}


def arranged(rotation: Tensor, sources: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Selects the columns ``sources`` of a rotation [d, d]. A source of -1 gives a column of zeros. Rows of zeros are
    appended until there are K rows, a power of two. Cached for the rotation's lifetime.

    Returns:
        bfloat16 [2, K, columns], two parts whose sum is close to the columns; and the exact columns, float32 [K,
        columns].
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


@cache
def whole_numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """``values`` as int32 [n]. Cached, because captured graphs read the tensor by its address."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def levels_of(codec: LevelRows, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the levels of a codec that stores rows in lanes: the ascending levels, float32 [n], in units of the
    scale; the boundaries between them, float32 [n - 1]; and their codes, int32 [n]. Cached, because captured graphs
    read the tensors by their addresses."""
    key = codec.id, dim, device
    if key not in _levels:
        by_code = codec.code_levels(dim, device)
        levels, codes = by_code.sort()
        _levels[key] = levels, (levels[1:] + levels[:-1]) / 2, codes.int()
    return _levels[key]


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    codecs = case.key_codec, case.value_codec
    reasons = unknown_codecs(*codecs, known=(*ROTATED_IN_KERNELS, CodecId.FP8, CodecId.LATENT_MIXED))
    if case.head_dim > MAX_DIMS and not {*ROTATED_IN_KERNELS}.isdisjoint(codecs):
        reasons.append(f"head dim {case.head_dim} is more than {MAX_DIMS}")
    return reasons


def quantize_rows(
    rows: Tensor,
    codec: RowCodec,
    rotation: Tensor | None,
    state: tuple[Tensor, ...],
    codes: Tensor,
    code_pages: Tensor,
    scale: Tensor,
    scale_pages: Tensor,
) -> None:
    """Same as the reference. Rows in 8-bit floats can have any number of dimensions. Rows with codes in lanes or vector
    codes can have up to 128. The last dimension of ``rows`` is contiguous.

    Raises:
        ValueError: another codec, or more dimensions.
    """
    layers, pages, _, heads, dim = rows.shape
    vectors = codec.id == CodecId.VQ_4X256 and rotation is not None
    lanes = codec.id in LANES and isinstance(codec, LevelRows) and rotation is not None
    known = vectors or lanes
    if not known and codec.id != CodecId.FP8:
        raise ValueError(f"quantize_rows in Triton does not know codec {codec.name!r} ({codec.id})")
    if known and dim > MAX_DIMS:
        raise ValueError(f"quantize_rows in Triton takes rows of up to {MAX_DIMS} dimensions, not {dim}")
    codec.check(dim)
    if not layers * pages:
        return
    if codec.id == CodecId.FP8:
        (steps,) = state
        _quantize_fp8[(pages, layers, heads)](
            rows, steps, codes, code_pages, *rows.stride()[:4], *steps.stride()[:3], codes.stride(0), codes.stride(1),
            SHARED=steps.shape[1] == 1, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), num_warps=WARPS,
        )  # fmt: skip
        return
    assert rotation is not None
    if vectors:
        largest, codebook = state
        entries, size = codebook.shape[3:]
        # Columns are ordered: the first dimension of every vector, then the second of every vector, and so on.
        sources = tuple(size * vector + place for place in range(size) for vector in range(dim // size))
        parts, exact = arranged(rotation, sources)
        _quantize_vectors[(pages, layers, heads)](
            rows, parts, exact, largest, codebook, codes, code_pages,
            *rows.stride()[:4], *largest.stride()[:3], *codebook.stride()[:2], codes.stride(0), codes.stride(1),
            SHARED=largest.shape[1] == 1, DIM=dim, ENTRIES=entries, num_warps=WARPS,
        )  # fmt: skip
        return
    assert isinstance(codec, LevelRows)
    per = codec.row_multiple // 8
    lane_bytes = dim // 8 // per
    block = triton.next_power_of_2(lane_bytes)
    # Columns are ordered by their code's place within a byte, then by lane, then by byte. A lane has ``lane_bytes``
    # bytes.
    sources = tuple(
        8 * (per * byte + place) + lane if byte < lane_bytes else -1
        for place in range(per) for lane in range(8) for byte in range(block)
    )  # fmt: skip
    parts, exact = arranged(rotation, sources)
    places = whole_numbers(codec.upper_places(dim), rows.device)
    _quantize_rows[(pages, layers, triton.cdiv(heads, HEADS_AT_ONCE))](
        rows, parts, exact, *levels_of(codec, dim, rows.device), places, codes, code_pages, scale, scale_pages,
        *rows.stride()[:4], codes.stride(0), codes.stride(1), scale.stride(0), scale.stride(1),
        HEADS=heads, AT_ONCE=HEADS_AT_ONCE, DIM=dim, DIM_BLOCK=exact.shape[0], BITS=codec.bits,
        UNIFORM=isinstance(codec, UniformRows),
        STEP=codec.step / dim**0.5 if isinstance(codec, UniformRows) else 1.0, RULE=codec.scale_rule,
        PER=per, LANE_BYTES=lane_bytes, LANE_BLOCK=block, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def rotate_rows(row, row_token, exact, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes ``x @ exact`` in float32 for 64 rows x that are not bfloat16. It takes a few dimensions at a time,
    because the whole rotation does not fit in shared memory."""
    AT_ONCE: tl.constexpr = 32 if DIM_BLOCK > 32 else DIM_BLOCK
    token, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, COLUMNS)[None, :]
    y = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in range(0, DIM_BLOCK, AT_ONCE):
        dim = start + tl.arange(0, AT_ONCE)
        x = tl.load(row + token * row_token + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
        matrix = tl.load(exact + dim[:, None] * COLUMNS + column)
        y = tl.dot(x.to(tl.float32), matrix, y, input_precision="tf32x3")
    return y


@triton.jit
def nearest_levels(x, levels, boundaries, codes, BITS: tl.constexpr):
    """Returns the nearest level of each entry, and the level's code. A level's index is the number of boundaries at or
    below the entry. NaN gets the lowest level."""
    if BITS > 4:  # binary search over the boundaries
        index = tl.zeros(x.shape, tl.int32)
        for bit in tl.static_range(BITS):
            half = 1 << (BITS - 1 - bit)
            index += tl.where(x >= tl.load(boundaries + index + (half - 1)), half, 0)
        return tl.load(levels + index), tl.load(codes + index)
    else:
        level = tl.zeros(x.shape, tl.float32) + tl.load(levels)
        code = tl.zeros(x.shape, tl.int32) + tl.load(codes)
        for i in tl.static_range(2**BITS - 1):
            above = x >= tl.load(boundaries + i)
            level = tl.where(above, tl.load(levels + i + 1), level)
            code = tl.where(above, tl.load(codes + i + 1), code)
        return level, code


@triton.jit(do_not_specialize_on_alignment=["code_pages"])
def _quantize_vectors(
    rows, parts, exact, largest, codebook, codes, code_pages,
    row_layer, row_page, row_token, row_head, largest_layer, largest_page, largest_head, book_layer, book_page,
    code_layer, code_page, SHARED: tl.constexpr, DIM: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes vector codes of one head of one page of one layer. A code is the number of the nearest entry of the
    codebook, or of the first of several nearest ones. NaN gets 0."""
    page, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    state = 0 if SHARED else page
    VECTORS: tl.constexpr = DIM // 4
    token, column, vector = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM), tl.arange(0, VECTORS)
    row = rows + layer * row_layer + page * row_page + head * row_head
    if rows.dtype.element_ty == tl.bfloat16:
        entry = tl.arange(0, DIM)[:, None] * DIM + column[None, :]
        x = tl.load(row + token * row_token + column[None, :])
        y = tl.dot(x, tl.load(parts + entry), tl.dot(x, tl.load(parts + DIM * DIM + entry)))
    else:
        y = rotate_rows(row, row_token, exact, DIM, DIM, DIM)
    size = largest + layer * largest_layer + state * largest_page + head * largest_head
    y /= tl.load(size + column % VECTORS * 4 + column // VECTORS)[None, :]
    y = tl.reshape(y, (TOKENS, 4, VECTORS))
    place = tl.arange(0, 4)[None, :, None]
    a, b = tl.sum(tl.where(place == 0, y, 0.0), 1), tl.sum(tl.where(place == 1, y, 0.0), 1)
    c, d = tl.sum(tl.where(place == 2, y, 0.0), 1), tl.sum(tl.where(place == 3, y, 0.0), 1)
    best = tl.full((TOKENS, VECTORS), float("-inf"), tl.float32)
    code = tl.zeros((TOKENS, VECTORS), tl.int32)
    book = codebook + layer * book_layer + state * book_page
    for number in range(ENTRIES):
        e, f = tl.load(book + 4 * number), tl.load(book + 4 * number + 1)
        g, h = tl.load(book + 4 * number + 2), tl.load(book + 4 * number + 3)
        closeness = a * e + b * f + c * g + d * h - (e * e + f * f + g * g + h * h) / 2
        code = tl.where(closeness > best, number, code)
        best = tl.maximum(closeness, best)
    target = codes + layer * code_layer + tl.load(code_pages + page) * code_page + head * (TOKENS * VECTORS)
    tl.store(target + token * VECTORS + vector[None, :], code.to(tl.uint8))


@triton.jit(do_not_specialize_on_alignment=["code_pages", "scale_pages"])
def _quantize_rows(
    rows, parts, exact, levels, boundaries, names, places, codes, code_pages, scale, scale_pages,
    row_layer, row_page, row_token, row_head, code_layer, code_page, scale_layer, scale_page,
    HEADS: tl.constexpr, AT_ONCE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BITS: tl.constexpr,
    UNIFORM: tl.constexpr, STEP: tl.constexpr, RULE: tl.constexpr, PER: tl.constexpr, LANE_BYTES: tl.constexpr,
    LANE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes codes in lanes of some heads of one page of one layer.

    ``kvcache.codecs.packing.Lanes`` explains planes and lanes. ``PER`` codes share a byte of the narrowest plane, whose
    8 lanes have ``LANE_BYTES`` bytes each. In the rotated tile, these codes are multiples of ``BYTES`` columns apart.
    Levels are in units of the row's norm times ``STEP``.
    """
    page, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    BYTES: tl.constexpr = 8 * LANE_BLOCK
    WIDTH: tl.constexpr = DIM * BITS // 8
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    column, token, dim = tl.arange(0, PER * BYTES), tl.arange(0, TOKENS), tl.arange(0, DIM_BLOCK)
    used = (column % LANE_BLOCK < LANE_BYTES)[None, :]
    entry = dim[:, None] * (PER * BYTES) + column[None, :]
    PARTED: tl.constexpr = rows.dtype.element_ty == tl.bfloat16
    if PARTED:
        near, far = tl.load(parts + entry), tl.load(parts + DIM_BLOCK * PER * BYTES + entry)
    place, byte = tl.arange(0, PER)[None, :, None], tl.arange(0, BYTES)[None, :]
    lane, within = byte // LANE_BLOCK, byte % LANE_BLOCK
    code_row = codes + layer * code_layer + tl.load(code_pages + page) * code_page + token[:, None] * WIDTH
    scale_row = scale + layer * scale_layer + tl.load(scale_pages + page) * scale_page + token
    row = rows + layer * row_layer + page * row_page
    first = tl.program_id(2) * AT_ONCE
    for head in range(first, min(first + AT_ONCE, HEADS)):
        if PARTED:
            own = row + head * row_head + token[:, None] * row_token + dim[None, :]
            x = tl.load(own, mask=(dim < DIM)[None, :], other=0.0)
            y = tl.dot(x, near, tl.dot(x, far))
        else:
            y = rotate_rows(row + head * row_head, row_token, exact, DIM, DIM_BLOCK, PER * BYTES)
        unit = STEP * tl.sqrt(tl.sum(y * y, 1))
        y = y / tl.where(unit == 0, 1.0, unit)[:, None]
        if UNIFORM:
            level = tl.minimum(tl.maximum(tl.floor(y), -MIDDLE), MIDDLE - 1)
            code, level = (level + MIDDLE).to(tl.int32), level + 0.5
        else:
            level, code = nearest_levels(y, levels, boundaries, names, BITS)
        level = tl.where(used, level, 0.0)
        if RULE == "least_squares":
            length = unit * tl.sum(y * level, 1) / tl.sum(level * level, 1)
        elif RULE == "unbiased":
            length = unit / tl.sum(y * level, 1)
        elif RULE == "renormalised":
            length = unit / tl.sqrt(tl.sum(level * level, 1))
        else:
            tl.static_assert(RULE == "norm", "an unknown rule of scales")
            length = unit
        tl.store(scale_row + head * TOKENS, tl.where(unit == 0, 0.0, length).to(tl.float16))
        code = tl.reshape(code, (TOKENS, PER, BYTES))
        target = code_row + head * TOKENS * WIDTH
        if BITS == 3:
            # The plane of the lower two bits comes first. It has two bytes for each byte of the plane of upper bits.
            low = tl.sum(tl.where(place < 4, (code & 3) << (2 * place), 0), 1)
            high = tl.sum(tl.where(place >= 4, (code & 3) << (2 * (place - 4)), 0), 1)
            at = lane * (2 * LANE_BYTES) + 2 * within
            tl.store(target + at, low.to(tl.uint8), mask=within < LANE_BYTES)
            tl.store(target + at + 1, high.to(tl.uint8), mask=within < LANE_BYTES)
            target += DIM // 4
            # The upper bits of a lane may be in any order across its bytes. ``places`` says where each bit is.
            here = within[:, None, :]
            bit = tl.load(places + here * PER + place, mask=here < LANE_BYTES, other=8 * LANE_BYTES)
            for i in tl.static_range(LANE_BYTES):
                own = tl.sum(tl.where(bit // 8 == i, (code >> 2) << (bit % 8), 0), 1)
                own = tl.sum(tl.reshape(own, (TOKENS, 8, LANE_BLOCK)), 2)
                tl.store(target + tl.arange(0, 8)[None, :] * LANE_BYTES + i, own.to(tl.uint8))
        else:
            packed = tl.sum(code << (BITS * place), 1)
            tl.store(target + lane * LANE_BYTES + within, packed.to(tl.uint8), mask=within < LANE_BYTES)


@triton.jit(do_not_specialize_on_alignment=["code_pages"])
def _quantize_fp8(
    rows, steps, codes, code_pages,
    row_layer, row_page, row_token, row_head, step_layer, step_page, step_head, code_layer, code_page,
    SHARED: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes 8-bit floats of one head of one page of one layer, in units of the head's step. Pages of a layer share
    this step (``SHARED``), or each page has its own."""
    page, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token, dim = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    row = rows + layer * row_layer + page * row_page + head * row_head
    step = tl.load(steps + layer * step_layer + (0 if SHARED else page) * step_page + head * step_head)
    x = tl.load(row + token * row_token + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    target = codes + layer * code_layer + tl.load(code_pages + page) * code_page + head * TOKENS * DIM
    tl.store(target + token * DIM + dim, e4m3_of(tl.math.div_rn(x, step)).to(tl.uint8), mask=dim < DIM)


@triton.jit
def e4m3_of(x):
    """Rounds float32 numbers to 8-bit floats (e4m3) and returns their codes as int32. Ties go to even codes. Magnitudes
    above the format's largest number become this number. The function uses arithmetic, because not all GPUs have an
    instruction for the conversion."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # From 2^-6 on, a code is the upper bits of the float32 with another exponent bias. Below 2^-6, a code is a number
    # of steps of 2^-9. At 2^14, float32 has steps of this size, so adding 2^14 leaves this number in the lowest bits.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, code | 0x80, code)
