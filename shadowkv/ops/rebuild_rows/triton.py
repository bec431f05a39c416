"""Rows of sealed pages in Triton, one page of one head at a time: every stored byte is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, LatentKeys
from shadowkv.ops.case import NOT_CENTRED, Case, unless
from shadowkv.ops.codec import LATENTS, UNIFORM, CodecId, UniformRows, unknown_codecs

BLOCKS = 32
"""Thread blocks that fill the bus, so that the others are free meanwhile."""

LEAST = 16
"""Dimensions that a matrix product takes at the least."""


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    return unknown_codecs(case.key_codec, case.value_codec) + unless(not case.centred, NOT_CENTRED)


def rebuild_rows(source: LatentKeys | DenseRows | CodedRows, first: int, out: Tensor, across_bus: bool) -> None:
    """As the reference; the last dimension of ``out`` is dense."""
    heads, rows, dim = out.shape
    tiles = rows // 64 * heads
    if not tiles:
        return
    pages, grid = source.pages[0, first:].contiguous(), (min(tiles, BLOCKS) if across_bus else tiles,)
    if isinstance(source, DenseRows):
        _copy_rows[grid](
            source.rows, pages, out, source.rows.stride(0), out.stride(0), out.stride(1), tiles,
            HEADS=heads, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim),
        )  # fmt: skip
    elif isinstance(source, CodedRows):
        codec = source.codec
        if codec.id not in UNIFORM or not isinstance(codec, UniformRows) or source.rotation is None:
            raise ValueError(f"rebuild_rows in Triton does not know codec {codec.name!r} ({codec.id})")
        # Centres of steps are exact in float16, and entries of a rotation have three more bits there than in bfloat16.
        rotation = source.rotation.to(out.dtype if out.dtype == torch.float32 else torch.float16)
        scale_pages = pages if source.scale_pages is None else source.scale_pages[0, first:].contiguous()
        bits = codec.bits
        low = 2 if bits == 3 else bits
        _dequantise_rows[grid](
            source.codes, pages, source.scale, scale_pages, rotation, out,
            source.codes.stride(0), source.scale.stride(0), out.stride(0), out.stride(1), tiles,
            BITS=bits, HEADS=heads, DIM=dim, DIM_BLOCK=_block(dim),
            LOW_BLOCK=_block(dim * low // 8), HIGH_BLOCK=_block(dim // 8),
        )  # fmt: skip
    else:
        config, mean = source.rotary.config, source.mean
        half, rest = config.dim // 2, dim - config.dim
        if source.codec.id not in LATENTS:
            raise ValueError(f"rebuild_rows in Triton does not know codec {source.codec.name!r} ({source.codec.id})")
        _rebuild_keys[grid](
            source.latents, pages, source.basis, source.basis if mean is None else mean, source.slots, source.first,
            source.rotary.cos, source.rotary.sin, out, source.latents.stride(0), source.basis.stride(0),
            0 if mean is None else mean.stride(0), out.stride(0), out.stride(1), first, tiles,
            HAS_MEAN=mean is not None, PACKED=source.codec.id == CodecId.LATENT_INT4, RANK=source.basis.shape[1],
            RANK_BLOCK=32, HEADS=heads, DIM=dim,
            HALF=half, HALF_BLOCK=_block(half), REST=rest, REST_BLOCK=_block(rest), INTERLEAVED=config.interleaved,
        )  # fmt: skip


def _block(size: int) -> int:
    return max(LEAST, triton.next_power_of_2(size))


@triton.jit
def _copy_rows(
    rows, pages, out, page_stride, head_stride, row_stride, tiles,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    token, dim = tl.arange(0, 64)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head, page = tile % HEADS, tile // HEADS
        source = rows + tl.load(pages + page) * page_stride + head * (64 * DIM)
        target = out + head * head_stride.to(tl.int64) + (page * 64 + token) * row_stride.to(tl.int64)
        x = tl.load(source + token * DIM + dim, mask=dim < DIM)
        tl.store(target + dim, x, mask=dim < DIM)


@triton.jit
def _dequantise_rows(
    codes, pages, scale, scale_pages, rotation, out, page_stride, scale_stride, head_stride, row_stride, tiles,
    BITS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    LOW_BLOCK: tl.constexpr, HIGH_BLOCK: tl.constexpr,
):  # fmt: skip
    token, dim = tl.arange(0, 64)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head, page = tile % HEADS, tile // HEADS
        source = codes + tl.load(pages + page) * page_stride + head * (DIM * BITS * 8)
        x = tl.zeros((64, DIM_BLOCK), tl.float32)
        middle: tl.constexpr = (2**BITS - 1) / 2
        if BITS == 3:  # a plane of the lower two bits, and behind it one of the upper ones
            x = _add_plane(x, source, rotation, 2, 1, middle, DIM * 3 // 8, LOW_BLOCK, DIM, DIM_BLOCK)
            x = _add_plane(x, source + DIM // 4, rotation, 1, 4, 0.0, DIM * 3 // 8, HIGH_BLOCK, DIM, DIM_BLOCK)
        else:
            x = _add_plane(x, source, rotation, BITS, 1, middle, DIM * BITS // 8, LOW_BLOCK, DIM, DIM_BLOCK)
        steps = tl.load(scale + tl.load(scale_pages + page) * scale_stride + head * 64 + token)
        target = out + head * head_stride.to(tl.int64) + (page * 64 + token) * row_stride.to(tl.int64)
        x = (x * steps.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(target + dim, x, mask=dim < DIM)


@triton.jit
def _add_plane(
    x, source, rotation, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, MIDDLE: tl.constexpr, ROW: tl.constexpr,
    BYTES_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds what the codes of ``WIDTH`` bits say, rotated back; a byte holds those of dimensions 8 apart."""
    BYTES: tl.constexpr = DIM * WIDTH // 8
    PER_BYTE: tl.constexpr = 8 // WIDTH
    PER_LANE: tl.constexpr = BYTES // 8
    token, byte, dim = tl.arange(0, 64)[:, None], tl.arange(0, BYTES_BLOCK), tl.arange(0, DIM_BLOCK)[None, :]
    packed = tl.load(source + token * ROW + byte[None, :], mask=byte[None, :] < BYTES, other=0)
    for i in tl.static_range(PER_BYTE):
        levels = (packed >> (i * WIDTH)) & (2**WIDTH - 1)
        coded = 8 * ((byte % PER_LANE) * PER_BYTE + i) + byte // PER_LANE  # the dimension of each
        lives = (byte[:, None] < BYTES) & (dim < DIM)
        back = tl.load(rotation + dim * DIM + coded[:, None], mask=lives, other=0.0)
        centres = (levels.to(tl.float32) * WEIGHT - MIDDLE).to(back.dtype)
        x += tl.dot(centres, back, input_precision="ieee")
    return x


@triton.jit
def _rebuild_keys(
    latents, pages, basis, mean, slots, starts, cos, sin, out, page_stride, basis_stride, mean_stride, head_stride,
    row_stride, first_page, tiles,
    HAS_MEAN: tl.constexpr, PACKED: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token, pair, other = tl.arange(0, 64)[:, None], tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    lives, rests, slot = pair < HALF, other < REST, tl.load(slots)
    start = tl.load(starts) + first_page * 64
    WIDTH: tl.constexpr = RANK // 2 if PACKED else RANK
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head, page = tile % HEADS, tile // HEADS
        rows = latents + tl.load(pages + page) * page_stride + token * WIDTH
        columns = basis + slot * basis_stride + head * DIM
        a = tl.zeros((64, HALF_BLOCK), tl.float32)
        b = tl.zeros((64, HALF_BLOCK), tl.float32)
        c = tl.zeros((64, REST_BLOCK), tl.float32)
        for least in range(0, RANK, RANK_BLOCK):
            inner = least + tl.arange(0, RANK_BLOCK)
            there = inner[:, None] < RANK
            if PACKED:  # two to a byte, the even one in the low four bits, both plus 8
                x = tl.load(rows + inner[None, :] // 2, mask=inner[None, :] < RANK, other=0)
                x = ((x >> (inner[None, :] % 2 * 4).to(tl.uint8)) & 15).to(tl.int8) - 8
            else:
                x = tl.load(rows + inner[None, :], mask=inner[None, :] < RANK, other=0)
            x = x.to(basis.dtype.element_ty)
            column = columns + inner[:, None] * (HEADS * DIM)
            a += tl.dot(x, tl.load(column + first, mask=there & lives, other=0.0), input_precision="ieee")
            b += tl.dot(x, tl.load(column + second, mask=there & lives, other=0.0), input_precision="ieee")
            if REST > 0:
                behind = tl.load(column + 2 * HALF + other, mask=there & rests, other=0.0)
                c += tl.dot(x, behind, input_precision="ieee")
        if HAS_MEAN:
            middle = mean + slot * mean_stride + head * DIM
            a += tl.load(middle + first, mask=lives, other=0.0).to(tl.float32)
            b += tl.load(middle + second, mask=lives, other=0.0).to(tl.float32)
            c += tl.load(middle + 2 * HALF + other, mask=rests, other=0.0).to(tl.float32)
        angle = (start + page * 64 + token) * HALF + pair
        cosine, sine = tl.load(cos + angle, mask=lives, other=0.0), tl.load(sin + angle, mask=lives, other=0.0)
        target = out + head * head_stride.to(tl.int64) + (page * 64 + token) * row_stride.to(tl.int64)
        tl.store(target + first, (a * cosine - b * sine).to(out.dtype.element_ty), mask=lives)
        tl.store(target + second, (b * cosine + a * sine).to(out.dtype.element_ty), mask=lives)
        if REST > 0:
            tl.store(target + 2 * HALF + other, c.to(out.dtype.element_ty), mask=rests)
