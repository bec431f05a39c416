"""Rebuilds rows of compressed pages in Triton, one page of one head at a time. Every stored byte is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows, LatentKeys
from shadowkv.ops.case import Case, unless
from shadowkv.ops.codec import FIXED_WIDTH_LATENTS, LANES, CodecId, LevelRows, unknown_codecs
from shadowkv.ops.page import PAGE
from shadowkv.ops.quantize_rows.triton import whole_numbers
from shadowkv.ops.triton_sizes import LARGEST_HEAD, TOKENS, dot_size

BLOCKS = 32
"""Thread blocks that are enough to saturate the bus to host memory. The rest of the GPU stays free for other work."""

MOST = 64
"""Coded dimensions that are multiplied with the codec's rotation at a time."""


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    large = unless(case.head_dim <= LARGEST_HEAD, f"head dim {case.head_dim} is above {LARGEST_HEAD}")
    return large + unknown_codecs(case.key_codec, case.value_codec, (*LANES, CodecId.FP8, CodecId.LATENT_MIXED))


def rebuild_rows(
    source: LatentKeys | DenseRows | CodedRows, first: int, out: Tensor, across_bus: bool, rows: Tensor | None = None
) -> None:
    """Same as the reference. The last dimension of ``out`` is contiguous. Rows of pages that are not needed are not
    written."""
    heads, tokens, dim = out.shape
    tiles = tokens // PAGE * heads
    if not tiles:
        return
    pages, grid = source.pages[0, first:].contiguous(), (min(tiles, BLOCKS) if across_bus else tiles,)
    several = rows is not None
    rows = pages if rows is None else rows
    if isinstance(source, DenseRows):
        _copy_rows[grid](
            source.rows, pages, rows, out, source.rows.stride(0), out.stride(0), out.stride(1), tiles,
            SEVERAL=several, HEADS=heads, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim),
        )  # fmt: skip
    elif isinstance(source, CodedRows):
        _rebuild_coded_rows(source, pages, rows, several, first, out, grid, tiles)
    else:
        source = source.decoded()
        config, mean = source.rotary.config, source.mean
        half, rest = config.dim // 2, dim - config.dim
        if source.codec.id not in FIXED_WIDTH_LATENTS and source.widths is None:
            raise ValueError(f"rebuild_rows in Triton does not know codec {source.codec.name!r} ({source.codec.id})")
        bits, bit = places_of_bits(source)
        _rebuild_keys[grid](
            source.latents, pages, rows, bits, bit, source.basis, source.basis if mean is None else mean,
            source.states, source.first, source.rotary.cos, source.rotary.sin, out,
            source.latents.stride(0), source.basis.stride(0), 0 if mean is None else mean.stride(0),
            out.stride(0), out.stride(1), first, tiles,
            SEVERAL=several, HAS_MEAN=mean is not None, PACKED=source.codec.id == CodecId.LATENT_INT4,
            MIXED=source.widths is not None, WIDTH=source.latents.shape[3], RANK=source.basis.shape[1], RANK_BLOCK=32,
            HEADS=heads, DIM=dim, HALF=half, HALF_BLOCK=dot_size(half), REST=rest, REST_BLOCK=dot_size(rest),
            INTERLEAVED=config.interleaved,
        )  # fmt: skip


def places_of_bits(source: LatentKeys) -> tuple[Tensor, Tensor]:
    """Returns the bits of each rank dimension, and the bit offset of its code within a token, int32 [B, r] each.

    Latents without widths get placeholders that are not read. The placeholders have the same alignment in all calls,
    because a kernel would be compiled again for another alignment.
    """
    if source.widths is None:
        return source.basis, source.basis
    bits = source.widths[source.states].to(torch.int32)
    return bits, bits.cumsum(1, dtype=torch.int32) - bits


def _rebuild_coded_rows(
    source: CodedRows, pages: Tensor, rows: Tensor, several: bool, first: int, out: Tensor, grid: tuple[int], tiles: int
) -> None:
    codec, (heads, _, dim) = source.codec, out.shape
    # Unless ``out`` is float32, entries of the rotation are float16, which has three more bits of mantissa than
    # bfloat16.
    exact = out.dtype if out.dtype == torch.float32 else torch.float16
    levels = places = rotation = step = source.codes
    scale_pages, bits = pages, 8
    if codec.id in LANES and isinstance(codec, LevelRows) and source.rotation is not None:
        by_code, bits = codec.code_levels(dim, out.device), codec.bits
        levels, rotation = by_code.to(exact), source.rotation.to(exact)
        places = whole_numbers(codec.upper_places(dim), out.device)
        if source.scale_pages is not None:
            scale_pages = source.scale_pages[0, first:].contiguous()
    elif codec.id == CodecId.FP8:
        (step,) = source.state
    else:
        raise ValueError(f"rebuild_rows in Triton does not know codec {codec.name!r} ({codec.id})")
    states = pages if source.states is None else source.states
    # Arguments that are not used get placeholders. ``pages`` may have any alignment: it stands in only for arguments
    # on whose alignment the kernel is not specialised.
    start, mean, cos, sin = pages, source.codes, source.codes, source.codes
    half, interleaved, centred = 0, False, isinstance(source, CentredKeys)
    if isinstance(source, CentredKeys):
        mean, start, cos, sin = source.mean, source.first, source.rotary.cos, source.rotary.sin
        half, interleaved = source.rotary.config.dim // 2, source.rotary.config.interleaved
    _decode_rows[grid](
        source.codes, pages, rows, source.scale, scale_pages, levels, places, rotation, step, states, mean, start, cos,
        sin, out, source.codes.stride(0), source.scale.stride(0), step.stride(0), mean.stride(0), out.stride(0),
        out.stride(1), first, tiles,
        SEVERAL=several, FP8=codec.id == CodecId.FP8, BITS=bits, CENTRED=centred, HEADS=heads, DIM=dim,
        DIM_BLOCK=dot_size(dim), AT_ONCE=min(MOST, dot_size(dim)), HALF=half, INTERLEAVED=interleaved,
        num_warps=8, num_stages=1,  # with more stages, 256 dimensions would not fit into shared memory
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["pages", "entries"])
def _copy_rows(
    rows, pages, entries, out, page_stride, head_stride, row_stride, tiles,
    SEVERAL: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    token, dim = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head, page = tile % HEADS, tile // HEADS
        entry = _entry(entries, page, SEVERAL)
        if entry >= 0:
            source = rows + tl.load(pages + page) * page_stride + head * (TOKENS * DIM)
            target = out + head * head_stride.to(tl.int64) + (page * TOKENS + token) * row_stride.to(tl.int64)
            x = tl.load(source + token * DIM + dim, mask=dim < DIM)
            tl.store(target + dim, x, mask=dim < DIM)


@triton.jit
def _entry(entries, page, SEVERAL: tl.constexpr):
    """The index of a page's entry in the states and first positions; negative for a page that is not needed."""
    if SEVERAL:
        return tl.load(entries + page).to(tl.int32)
    else:
        return 0


@triton.jit(
    do_not_specialize=["first_page", "tiles"],
    do_not_specialize_on_alignment=["pages", "entries", "scale_pages", "states", "starts"],
)
def _decode_rows(
    codes, pages, entries, scale, scale_pages, levels, places, rotation, step, states, mean, starts, cos, sin, out,
    page_stride, scale_stride, step_stride, mean_stride, head_stride, row_stride, first_page, tiles,
    SEVERAL: tl.constexpr, FP8: tl.constexpr, BITS: tl.constexpr, CENTRED: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token, dim = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    lives = dim < DIM
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head, page = tile % HEADS, tile // HEADS
        entry = _entry(entries, page, SEVERAL)
        if entry >= 0:
            row = codes + tl.load(pages + page) * page_stride + head * (DIM * BITS * 8) + token * (DIM * BITS // 8)
            if FP8:
                x = _float_of_e4m3(tl.load(row + dim, mask=lives, other=0).to(tl.int32))
                x *= tl.load(step + tl.load(states + entry) * step_stride + head)
            else:
                x = tl.zeros((TOKENS, DIM_BLOCK), tl.float32)
                for start in tl.static_range(0, DIM_BLOCK, AT_ONCE):
                    coded = start + tl.arange(0, AT_ONCE)
                    there = coded < DIM
                    level = tl.load(levels + _codes(row, coded[None, :], places, there[None, :], BITS, DIM))
                    back = tl.load(rotation + dim * DIM + coded[:, None], mask=there[:, None] & lives, other=0.0)
                    level = tl.where(there[None, :], level, 0.0).to(back.dtype)
                    x = tl.dot(level, back, x, input_precision="tf32x3")
                sizes = tl.load(scale + tl.load(scale_pages + page) * scale_stride + head * TOKENS + token)
                x *= sizes.to(tl.float32)
            if CENTRED:
                middle, in_rope = mean + tl.load(states + entry) * mean_stride + head * DIM, dim < 2 * HALF
                if INTERLEAVED:
                    pair, other, upper = dim // 2, dim ^ 1, dim % 2 == 1
                else:
                    upper = dim >= HALF
                    pair = tl.where(upper, dim - HALF, dim)
                    other = tl.where(upper, pair, dim + HALF)
                angle = (tl.load(starts + entry) + (first_page + page) * TOKENS + token) * HALF + pair
                cosine, sine = (
                    tl.load(cos + angle, mask=in_rope, other=1.0),
                    tl.load(sin + angle, mask=in_rope, other=0.0),
                )
                across = tl.load(middle + other, mask=in_rope, other=0.0)
                x += tl.load(middle + dim, mask=lives, other=0.0) * cosine + tl.where(upper, across, -across) * sine
            target = out + head * head_stride.to(tl.int64) + (page * TOKENS + token) * row_stride.to(tl.int64)
            tl.store(target + dim, x.to(out.dtype.element_ty), mask=lives)


@triton.jit
def _codes(row, dim, places, there, BITS: tl.constexpr, DIM: tl.constexpr):
    """Loads the codes of dimensions ``dim`` from rows stored in lanes. A lane holds dimensions 8 apart."""
    lane, i = dim % 8, dim // 8
    LOW: tl.constexpr = 2 if BITS == 3 else BITS  # bits of the first plane
    at = lane * (DIM * LOW // 64) + i * LOW // 8
    code = (tl.load(row + at, mask=there, other=0).to(tl.int32) >> (i * LOW % 8)) & ((1 << LOW) - 1)
    if BITS == 3:  # the plane of upper bits follows
        place = tl.load(places + i, mask=there, other=0)
        upper = tl.load(row + DIM // 4 + lane * (DIM // 64) + place // 8, mask=there, other=0).to(tl.int32)
        code |= ((upper >> (place % 8)) & 1) << 2
    return code


@triton.jit
def _float_of_e4m3(x):
    """Converts codes of 8-bit floats (e4m3), as int32, to float32. The function uses arithmetic, because not all GPUs
    have an instruction for the conversion."""
    size = x & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(x >= 0x80, -value, value)


@triton.jit
def decoded_latents(
    rows, rank, wanted, bits, bit,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Loads the rank dimensions ``rank`` [n] of m latents, which start at the pointers ``rows`` [m, 1]. Results that
    are not ``wanted`` are arbitrary. ``bits`` and ``bit`` point to this row in the results of ``places_of_bits``."""
    if MIXED:  # codes offset by half their range, lowest bits first, across at most two bytes
        width = tl.load(bits + rank, mask=rank < RANK, other=0)
        begin = tl.load(bit + rank, mask=rank < RANK, other=0)
        byte = (begin // 8)[None, :]
        low = tl.load(rows + byte, mask=wanted & (byte < WIDTH), other=0).to(tl.int32)
        high = tl.load(rows + byte + 1, mask=wanted & (byte + 1 < WIDTH), other=0).to(tl.int32)
        codes = ((low | (high << 8)) >> (begin % 8)[None, :]) & ((1 << width) - 1)[None, :]
        return codes - ((1 << width) // 2)[None, :]
    elif PACKED:  # codes offset by half their range: strong ones in one byte each, the others two per byte
        STRONG: tl.constexpr = 2 * WIDTH - RANK
        strong = rank < STRONG
        byte = tl.where(strong, rank, (rank + STRONG) // 2)
        stored = tl.load(rows + byte[None, :], mask=wanted, other=0).to(tl.int32)
        weak = (stored >> (rank % 2 * 4)[None, :]) & 15
        return tl.where(strong[None, :], stored - 128, weak - 8)
    else:
        return tl.load(rows + rank[None, :], mask=wanted, other=0)


@triton.jit(
    do_not_specialize=["first_page", "tiles"], do_not_specialize_on_alignment=["pages", "entries", "states", "starts"]
)
def _rebuild_keys(
    latents, pages, entries, bits, bit, basis, mean, states, starts, cos, sin, out,
    page_stride, basis_stride, mean_stride, head_stride, row_stride, first_page, tiles,
    SEVERAL: tl.constexpr, HAS_MEAN: tl.constexpr, PACKED: tl.constexpr, MIXED: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token, pair, other = (
        tl.arange(0, TOKENS)[:, None],
        tl.arange(0, HALF_BLOCK)[None, :],
        tl.arange(0, REST_BLOCK)[None, :],
    )
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    lives, rests = pair < HALF, other < REST
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head, page = tile % HEADS, tile // HEADS
        entry = _entry(entries, page, SEVERAL)
        if entry >= 0:
            state = tl.load(states + entry)
            start = tl.load(starts + entry) + first_page * TOKENS
            rows = latents + tl.load(pages + page) * page_stride + token * WIDTH
            columns = basis + state * basis_stride + head * DIM
            a = tl.zeros((TOKENS, HALF_BLOCK), tl.float32)
            b = tl.zeros((TOKENS, HALF_BLOCK), tl.float32)
            c = tl.zeros((TOKENS, REST_BLOCK), tl.float32)
            for least in range(0, RANK, RANK_BLOCK):
                inner = least + tl.arange(0, RANK_BLOCK)
                there = inner[:, None] < RANK
                x = decoded_latents(
                    rows,
                    inner,
                    inner[None, :] < RANK,
                    bits + entry * RANK,
                    bit + entry * RANK,
                    RANK,
                    WIDTH,
                    PACKED,
                    MIXED,
                )
                x = x.to(basis.dtype.element_ty)
                column = columns + inner[:, None] * (HEADS * DIM)
                a += tl.dot(x, tl.load(column + first, mask=there & lives, other=0.0), input_precision="ieee")
                b += tl.dot(x, tl.load(column + second, mask=there & lives, other=0.0), input_precision="ieee")
                if REST > 0:
                    behind = tl.load(column + 2 * HALF + other, mask=there & rests, other=0.0)
                    c += tl.dot(x, behind, input_precision="ieee")
            if HAS_MEAN:
                middle = mean + state * mean_stride + head * DIM
                a += tl.load(middle + first, mask=lives, other=0.0).to(tl.float32)
                b += tl.load(middle + second, mask=lives, other=0.0).to(tl.float32)
                c += tl.load(middle + 2 * HALF + other, mask=rests, other=0.0).to(tl.float32)
            angle = (start + page * TOKENS + token) * HALF + pair
            cosine, sine = tl.load(cos + angle, mask=lives, other=0.0), tl.load(sin + angle, mask=lives, other=0.0)
            target = out + head * head_stride.to(tl.int64) + (page * TOKENS + token) * row_stride.to(tl.int64)
            tl.store(target + first, (a * cosine - b * sine).to(out.dtype.element_ty), mask=lives)
            tl.store(target + second, (b * cosine + a * sine).to(out.dtype.element_ty), mask=lives)
            if REST > 0:
                tl.store(target + 2 * HALF + other, c.to(out.dtype.element_ty), mask=rests)
