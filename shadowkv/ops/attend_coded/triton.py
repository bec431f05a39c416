"""Attention over coded rows in Triton: a page of one kv head at a time, all of its query heads together, pages of a
sequence in several parts.

Codes are levels of a table, 8-bit floats as well, looked up where the page is; their order is that of the bytes, which
queries, rotated once, are brought into, and the output is brought out of. What the mean key adds to the logits needs no
angle of each token: cosines and sines of a page's first token turn the queries' side, those of the 64 places behind it
are the same for all pages.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.attend_coded.reference import turned_products
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows
from shadowkv.ops.case import Case
from shadowkv.ops.codec import LANES, CodecId, unknown_codecs
from shadowkv.ops.page import PAGE

TOKENS = tl.constexpr(PAGE)
"""Of a page, for kernels."""

LEAST = 16
"""Rows that a matrix product takes at the least."""

WAVES = 4
"""Thread blocks for each multiprocessor, so that ragged lengths even out."""

LEAST_PAGES = 4
"""Pages that are worth a thread block."""


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    return unknown_codecs(case.key_codec, case.value_codec, (*LANES, CodecId.FP8))


def attend_coded(
    q: Tensor, keys: DenseRows | CodedRows, values: DenseRows | CodedRows, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """As the reference; dense rows, 8-bit floats, and codes in lanes (``RowCodec.lane_levels``).

    Products of 16-bit queries are of float16 levels. Pages of a head lie together.

    Raises:
        ValueError: another codec.
    """
    batch, query_heads, dim = q.shape
    key_codes, value_codes = codes_of(keys), codes_of(values)
    heads = key_codes.shape[1]
    group, count = query_heads // heads, keys.pages.shape[1]
    if not count or not batch:
        return torch.zeros_like(q), q.new_full((batch, query_heads), -math.inf, dtype=torch.float32)
    exact = torch.float32 if q.dtype == torch.float32 else torch.float16
    grouped = q.float().unflatten(1, (heads, group)) * (dim**-0.5 * math.log2(math.e))
    key_form, value_form = StoredForm(keys, dim, exact), StoredForm(values, dim, exact)
    asked = key_form.ordered(grouped)
    mean, half = _mean(grouped, keys)
    parts = thread_blocks(batch * heads, count, q.device)
    out = torch.empty(batch, heads, parts, group, value_form.columns, dtype=torch.float32, device=q.device)
    lse = out.new_empty(batch, heads, parts, group)
    _attend_coded[(batch * heads, parts)](
        asked, key_codes, key_form.scale, keys.pages, key_form.scale_pages, key_form.table, key_form.step,
        value_codes, value_form.scale, values.pages, value_form.scale_pages, value_form.table,
        begin, end, *mean, out, lse,
        key_codes.stride(0), key_form.scale.stride(0), value_codes.stride(0), value_form.scale.stride(0),
        count, triton.cdiv(count, parts),
        HEADS=heads, GROUP=group, GROUP_BLOCK=max(LEAST, triton.next_power_of_2(group)), DIM=dim,
        KEY_BITS=key_form.bits, KEY_SELECTORS=key_form.selectors, KEY_COLUMNS=key_form.columns,
        KEY_SCALED=key_form.scaled, KEY_STEPPED=key_form.stepped,
        VALUE_BITS=value_form.bits, VALUE_SELECTORS=value_form.selectors, VALUE_COLUMNS=value_form.columns,
        VALUE_SCALED=value_form.scaled, HALF=half, HALF_BLOCK=max(LEAST, triton.next_power_of_2(half)), num_warps=4,
    )  # fmt: skip
    return value_form.merged(out, lse, q.dtype)


def thread_blocks(units: int, pages: int, device: torch.device) -> int:
    """Thread blocks that share the pages of each of ``units`` sequences x kv heads."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    return max(1, min(pages // LEAST_PAGES, WAVES * processors // units))


def codes_of(source: DenseRows | CodedRows) -> Tensor:
    """What is stored of each token: rows [N, H, C, c, d], or codes uint8 [N, H, C, c, w]."""
    return source.rows if isinstance(source, DenseRows) else source.codes


class StoredForm:
    """How rows are stored, as the kernel needs to know it.

    Attributes:
        bits: of a code, 0 of dense rows.
        selectors: whether the plane of upper bits is in the order of ``SelectorLanes``.
        columns: of a decoded row, a power of two.
        table: what codes stand for, in units of the scale or the step.
        scaled: whether each token has a scale.
        scale, scale_pages: anything where it has none.
        stepped: whether each head has a step.
        step: float32 [B, H, 1], anything where there is none.
    """

    def __init__(self, source: DenseRows | CodedRows, dim: int, exact: torch.dtype) -> None:
        self.rotation: Tensor | None = None
        self.dim, self.exact, self.bits, self.selectors = dim, exact, 0, False
        self.scaled = self.stepped = False
        self.columns = max(LEAST, triton.next_power_of_2(dim))
        self.scale = self.table = self.step = codes_of(source)
        self.scale_pages = source.pages
        self.order = torch.arange(self.columns, device=self.table.device)
        if isinstance(source, DenseRows):
            return
        codec, table = source.codec, source.codec.lane_levels(dim, source.codes.device)
        if codec.id == CodecId.FP8:
            (step,) = source.state
            self.bits, self.table, self.stepped = 8, _floats(self.table.device).to(exact), True
            self.step = step[source.slots].contiguous()
            return
        if table is None or source.state:
            raise ValueError(f"attend_coded in Triton does not know codec {codec.name!r} ({codec.id})")
        self.bits, self.rotation, self.scale = len(table).bit_length() - 1, source.rotation, source.scale
        self.scaled = True
        self.selectors = codec.id == CodecId.LLOYD_3BIT and dim % 128 == 0
        self.table = table.to(exact)
        self.scale_pages = source.pages if source.scale_pages is None else source.scale_pages
        self.order = _lane_order(dim, self.bits, self.table.device)
        self.columns = len(self.order)

    def ordered(self, q: Tensor) -> Tensor:
        """Queries [..., d] as they are multiplied with rows, [..., columns]."""
        turned = q if self.rotation is None else q @ self.rotation
        padded = torch.nn.functional.pad(turned, (0, self.columns))
        return padded[..., self.order].to(self.exact)

    def merged(self, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Attention [B, H G, d] and its log-sum-exps [B, H G] of those of parts, [B, H, parts, G, columns] and
        [B, H, parts, G]."""
        total = lse.logsumexp(2)
        weights = (lse - total.masked_fill(total == -math.inf, 0).unsqueeze(2)).exp()
        joined = self._restored((out * weights.unsqueeze(-1)).sum(2))
        return joined.flatten(1, 2).to(dtype), total.flatten(1, 2)

    def _restored(self, out: Tensor) -> Tensor:
        """What is summed of rows [B, H, G, columns] as it was before they were stored, [B, H, G, d]."""
        back = out.new_zeros(*out.shape[:-1], max(self.dim, self.columns) + 1)
        back[..., self.order] = out
        rows = back[..., : self.dim]
        if self.stepped:
            return rows * self.step.unsqueeze(2)
        return rows if self.rotation is None else rows @ self.rotation.T


@cache
def _floats(device: torch.device) -> Tensor:
    """What all 8-bit floats stand for, float32 [256]."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


@cache
def _lane_order(dim: int, bits: int, device: torch.device) -> Tensor:
    """Dimensions int64 [columns] in the order of codes in lanes, ``dim`` for columns that are none. It is kept: in
    captured steps it would be computed anew in every layer."""
    places = 8 // (1 if bits == 3 else bits)
    run = dim // 8 // places  # bytes of a lane
    byte = torch.arange(triton.next_power_of_2(8 * run), device=device)[:, None]
    at = 8 * (byte % run * places + torch.arange(places, device=device)) + byte // run
    return at.masked_fill(byte >= 8 * run, dim).flatten()


def _mean(q: Tensor, keys: DenseRows | CodedRows) -> tuple[tuple[Tensor, ...], int]:
    """Of centred keys by frequency what cosines and sines are multiplied by, [B, H, G, half] each, what is added
    besides, the rotation's tables and the rows' first positions; and half."""
    if not isinstance(keys, CentredKeys):
        return (q, q, q, q, q, q, q, keys.pages), 0
    rotary = keys.rotary
    along, across, rest = turned_products(q, keys.mean[keys.slots].unsqueeze(2), rotary)
    near = tuple(table[:PAGE] / rotary.config.magnitude for table in (rotary.cos, rotary.sin))
    tables = rotary.cos, rotary.sin, *near
    return (along.contiguous(), across.contiguous(), rest.contiguous(), *tables, keys.first), along.shape[-1]


@triton.jit
def _attend_coded(
    asked, key_codes, key_scale, key_pages, key_scale_pages, key_table, key_step,
    value_codes, value_scale, value_pages, value_scale_pages, value_table,
    begin, end, along, across, rest, cos, sin, near_cos, near_sin, first, out, lse,
    key_page, key_scale_page, value_page, value_scale_page, pages, pages_each,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_SELECTORS: tl.constexpr, KEY_COLUMNS: tl.constexpr,
    KEY_SCALED: tl.constexpr, KEY_STEPPED: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_SELECTORS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    VALUE_SCALED: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of the pages of one kv head of a row."""
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = unit // HEADS, unit % HEADS
    member, token = tl.arange(0, GROUP_BLOCK), tl.arange(0, TOKENS)
    alive = (member < GROUP)[:, None]
    column = tl.arange(0, KEY_COLUMNS)
    q = tl.load(asked + (unit * GROUP + member[:, None]) * KEY_COLUMNS + column[None, :], mask=alive, other=0.0)
    frequency = tl.arange(0, HALF_BLOCK)
    turning = frequency < HALF
    if HALF > 0:
        at = (unit * GROUP + member[:, None]) * HALF + frequency[None, :]
        there = alive & turning[None, :]
        a, b = tl.load(along + at, mask=there, other=0.0), tl.load(across + at, mask=there, other=0.0)
        c = tl.load(rest + unit * GROUP + member, mask=member < GROUP, other=0.0)
        place = token[None, :] * HALF + frequency[:, None]
        near_c = tl.load(near_cos + place, mask=turning[:, None], other=0.0)
        near_s = tl.load(near_sin + place, mask=turning[:, None], other=0.0)
        start = tl.load(first + row)
    low, high = tl.load(begin + row), tl.load(end + row)
    peak = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VALUE_COLUMNS], tl.float32)
    last = tl.minimum((part + 1) * pages_each, tl.minimum(pages, tl.cdiv(high, TOKENS).to(tl.int32)))
    for page in range(tl.maximum(part * pages_each, (low // TOKENS).to(tl.int32)), last):
        name = tl.load(key_pages + row * pages + page)
        keys = decoded_rows(
            key_codes + name * key_page, key_table, head, token, KEY_BITS, KEY_SELECTORS, DIM, KEY_COLUMNS
        )
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if KEY_STEPPED:
            scores *= tl.load(key_step + unit)
        if KEY_SCALED:
            name = tl.load(key_scale_pages + row * pages + page)
            scores *= tl.load(key_scale + name * key_scale_page + head * TOKENS + token).to(tl.float32)[None, :]
        if HALF > 0:
            angle = (start + page * TOKENS) * HALF + frequency
            page_c, page_s = (
                tl.load(cos + angle, mask=turning, other=0.0),
                tl.load(sin + angle, mask=turning, other=0.0),
            )
            scores += tl.dot(a * page_c[None, :] + b * page_s[None, :], near_c, input_precision="tf32x3")
            scores += tl.dot(b * page_c[None, :] - a * page_s[None, :], near_s, input_precision="tf32x3")
            scores += c[:, None]
        place_in_row = page * TOKENS + token
        lives = (place_in_row >= low) & (place_in_row < high)
        scores = tl.where(lives[None, :], scores, float("-inf"))
        name = tl.load(value_pages + row * pages + page)
        values = decoded_rows(
            value_codes + name * value_page, value_table, head, token, VALUE_BITS, VALUE_SELECTORS, DIM, VALUE_COLUMNS
        )
        scale = tl.full([TOKENS], 1.0, tl.float32)
        if VALUE_SCALED:
            name = tl.load(value_scale_pages + row * pages + page)
            scale = tl.load(value_scale + name * value_scale_page + head * TOKENS + token).to(tl.float32)
        peak, total, acc = add_tokens(q, scores, lives, values, scale, peak, total, acc, VALUE_SCALED)
    target = (unit * tl.num_programs(1) + part) * GROUP
    store_part(out, lse, target, peak, total, acc, GROUP, GROUP_BLOCK, VALUE_COLUMNS)


@triton.jit
def add_tokens(q, scores, lives, values, scale, peak, total, acc, SCALED: tl.constexpr):
    """Largest scores, sums of weights and of weighed values, of 64 tokens more: scores in the exponent to base 2, -inf
    of tokens that are none."""
    most = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp2(scores - base[:, None])
    faded = tl.exp2(peak - base)
    total = total * faded + tl.sum(weights, 1)
    values = tl.where(lives[:, None], values, 0.0)
    if SCALED:
        scale = tl.where(lives, scale, 0.0)
        # In units of the largest, so that small weights of small rows do not vanish in float16.
        largest = tl.max(scale, 0)
        largest = tl.where(largest > 0, largest, 1.0)
        weights *= (scale / largest)[None, :]
        weighed = tl.dot(weights.to(q.dtype), values.to(q.dtype), input_precision="ieee") * largest
    else:
        weighed = tl.dot(weights.to(q.dtype), values.to(q.dtype), input_precision="ieee")
    return most, total, acc * faded[:, None] + weighed


@triton.jit
def store_part(
    out, lse, target, peak, total, acc, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Stores what a part has attended to, from row ``target`` on."""
    member, column = tl.arange(0, GROUP_BLOCK), tl.arange(0, COLUMNS)
    alive = member < GROUP
    found = total != 0  # NaN has to show
    acc = acc / tl.where(found, total, 1.0)[:, None]
    sums = tl.where(found, (peak + tl.log2(tl.where(found, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(out + (target + member)[:, None] * COLUMNS + column[None, :], acc, mask=alive[:, None])
    tl.store(lse + target + member, sums, mask=alive)


@triton.jit
def decoded_rows(
    page, table, head, token, BITS: tl.constexpr, SELECTORS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows [64, COLUMNS] of a page of one head: dense ones, or what codes stand for, in the order of their bytes."""
    if BITS == 0:
        column = tl.arange(0, COLUMNS)[None, :]
        row = page + head * (TOKENS * DIM) + token[:, None] * DIM
        return tl.load(row + column, mask=column < DIM, other=0.0)
    else:
        # Codes that share a byte of the narrowest plane.
        PLACES: tl.constexpr = 8 if BITS == 3 else 8 // BITS
        BYTES: tl.constexpr = COLUMNS // PLACES
        USED: tl.constexpr = DIM // PLACES
        RUN: tl.constexpr = USED // 8
        row = page + head * (DIM * BITS * 8) + token[:, None] * (DIM * BITS // 8)
        byte = tl.arange(0, BYTES)[None, :]
        place = tl.arange(0, PLACES)[None, None, :]
        there = byte < USED
        if BITS == 3:  # two bytes of the plane of the lower two bits are over one of the upper ones
            at = row + byte // RUN * (2 * RUN) + 2 * (byte % RUN)
            first = tl.load(at, mask=there, other=0).to(tl.int32)[:, :, None]
            second = tl.load(at + 1, mask=there, other=0).to(tl.int32)[:, :, None]
            lower = (tl.where(place < 4, first, second) >> (place % 4 * 2)) & 3
            upper = row + DIM // 4 + byte
            if SELECTORS:  # of two bytes both have bits of the first eight codes, and both of the last eight
                even = tl.load(upper - byte % 2, mask=there, other=0).to(tl.int32)[:, :, None]
                odd = tl.load(upper - byte % 2 + 1, mask=there, other=0).to(tl.int32)[:, :, None]
                bit = place % 4 // 2 * 4 + (byte % 2 * 2)[:, :, None] + place % 2
                codes = lower | (((tl.where(place < 4, even, odd) >> bit) & 1) << 2)
            else:
                plane = tl.load(upper, mask=there, other=0).to(tl.int32)[:, :, None]
                codes = lower | (((plane >> place) & 1) << 2)
        else:
            packed = tl.load(row + byte, mask=there, other=0).to(tl.int32)[:, :, None]
            codes = (packed >> (place * BITS)) & ((1 << BITS) - 1)
        return tl.load(table + tl.reshape(codes, (TOKENS, COLUMNS)))
