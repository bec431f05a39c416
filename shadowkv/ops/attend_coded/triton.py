"""Attention over coded rows in Triton. A program takes one part of a sequence's pages for one kv head, with all query
heads of this kv head. It attends to one page at a time.

Scores of mean keys need no cosine and sine per token. A token's angle is the angle of the page's first token plus that
of the token's offset in the page. The angle of the first token rotates the factors of ``rope_products`` once per page.
Cosines and sines of the 64 offsets are the same for all pages.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.attend_coded.reference import rope_products
from shadowkv.ops.attend_coded.triton_rows import PAGEWISE, TOKENWISE, StoredForm, codes_of, decoded_rows
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows, attend_once
from shadowkv.ops.attention_results import attend_to_nothing
from shadowkv.ops.case import Case, unless
from shadowkv.ops.codec import FIXED_WIDTH_LATENTS, unknown_codecs
from shadowkv.ops.extension import multiprocessors
from shadowkv.ops.page import PAGE
from shadowkv.ops.sequence_rows import SequenceRows
from shadowkv.ops.triton_sizes import LARGEST_HEAD, TOKENS, dot_size

WAVES = 4
"""Thread blocks per multiprocessor. Several blocks even out ragged lengths."""

MOST_QUERIES = 64
"""Maximum number of queries of a kv head in a program, half as many if they have 256 dimensions, because registers are
limited (not measured). If the rows of a sequence have more, each row reads the pages for itself."""

MIN_PAGES = 4
"""Minimum number of pages per thread block."""


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    reasons = unless(case.key_codec not in FIXED_WIDTH_LATENTS, f"codec {case.key_codec} of keys is for latents")
    reasons += unless(case.head_dim <= LARGEST_HEAD, f"head dim {case.head_dim} is above {LARGEST_HEAD}")
    return reasons + unknown_codecs(case.key_codec, case.value_codec, TOKENWISE + PAGEWISE)


def attend_coded(
    q: Tensor,
    keys: DenseRows | CodedRows,
    values: DenseRows | CodedRows,
    begin: Tensor,
    end: Tensor,
    sequences: SequenceRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, for dense rows and the codecs that ``StoredForm`` supports.

    If queries have 16 bits, matrix products have operands in float16. The rows of a head in a page must be contiguous.

    Raises:
        ValueError: another codec.
    """
    heads = codes_of(keys).shape[1]
    if sequences is not None and _fit(q.shape[1] // heads * sequences.most, q.shape[2]):
        return attend_once(attend_coded, q, keys, values, begin, end, sequences)
    batch, query_heads, dim = q.shape
    key_codes, value_codes = codes_of(keys), codes_of(values)
    group, count = query_heads // heads, keys.pages.shape[1]
    if not count or not batch:
        return attend_to_nothing(q)
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
        HEADS=heads, GROUP=group, GROUP_BLOCK=dot_size(group), DIM=dim,
        KEY_FORMAT=key_form.format, KEY_BITS=key_form.bits, KEY_COLUMNS=key_form.columns, KEY_SCALES=key_form.scales,
        KEY_SCALED=key_form.scaled, KEY_STEPPED=key_form.stepped,
        VALUE_FORMAT=value_form.format, VALUE_BITS=value_form.bits, VALUE_COLUMNS=value_form.columns,
        VALUE_SCALES=value_form.scales, VALUE_SCALED=value_form.scaled, VALUE_ENTRIES=value_form.row_entries,
        HALF=half, HALF_BLOCK=dot_size(half), num_warps=4,
        num_stages=3 if exact == torch.float16 else 1,  # in float32, 3 would not fit into shared memory
    )  # fmt: skip
    return value_form.merged(out, lse, q.dtype)


def _fit(queries: int, dim: int) -> bool:
    """Whether a program can take so many queries of a kv head."""
    return queries * max(dim, 128) <= MOST_QUERIES * 128


def thread_blocks(units: int, pages: int, device: torch.device) -> int:
    """Returns the number of thread blocks that share the pages of a unit. A unit is one kv head of one sequence."""
    processors = multiprocessors(device) if device.type == "cuda" else 16
    return max(1, min(pages // MIN_PAGES, WAVES * processors // units))


def _mean(q: Tensor, keys: DenseRows | CodedRows) -> tuple[tuple[Tensor, ...], int]:
    """Returns the kernel's arguments for centred keys, and the number of RoPE's frequencies. The arguments are the
    results of ``rope_products``, RoPE's tables, and the rows' first positions. If keys are not centred, the arguments
    are placeholders and the number is 0."""
    if not isinstance(keys, CentredKeys):
        return (q, q, q, q, q, q, q, keys.pages), 0
    rotary = keys.rotary
    along, across, rest = rope_products(q, keys.mean[keys.states].unsqueeze(2), rotary)
    near = tuple(table[:PAGE] / rotary.config.magnitude for table in (rotary.cos, rotary.sin))
    tables = rotary.cos, rotary.sin, *near
    return (along.contiguous(), across.contiguous(), rest.contiguous(), *tables, keys.first), along.shape[-1]


@triton.jit(
    do_not_specialize=["pages", "pages_each"],
    do_not_specialize_on_alignment=["key_pages", "key_scale_pages", "value_pages", "value_scale_pages", "pages"],
)
def _attend_coded(
    asked, key_codes, key_scale, key_pages, key_scale_pages, key_table, key_step,
    value_codes, value_scale, value_pages, value_scale_pages, value_table,
    begin, end, along, across, rest, cos, sin, near_cos, near_sin, first, out, lse,
    key_page, key_scale_page, value_page, value_scale_page, pages, pages_each,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr,
    KEY_FORMAT: tl.constexpr, KEY_BITS: tl.constexpr, KEY_COLUMNS: tl.constexpr, KEY_SCALES: tl.constexpr,
    KEY_SCALED: tl.constexpr, KEY_STEPPED: tl.constexpr,
    VALUE_FORMAT: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, VALUE_SCALES: tl.constexpr,
    VALUE_SCALED: tl.constexpr, VALUE_ENTRIES: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """Attends to one part of the pages of one kv head of a row."""
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = unit // HEADS, unit % HEADS
    member, token = tl.arange(0, GROUP_BLOCK), tl.arange(0, TOKENS)
    alive = (member < GROUP)[:, None]
    column = tl.arange(0, KEY_COLUMNS)
    q = tl.load(asked + (unit * GROUP + member[:, None]) * KEY_COLUMNS + column[None, :], mask=alive, other=0.0)
    frequency = tl.arange(0, HALF_BLOCK)
    in_half = frequency < HALF
    if HALF > 0:
        at = (unit * GROUP + member[:, None]) * HALF + frequency[None, :]
        there = alive & in_half[None, :]
        a, b = tl.load(along + at, mask=there, other=0.0), tl.load(across + at, mask=there, other=0.0)
        c = tl.load(rest + unit * GROUP + member, mask=member < GROUP, other=0.0)
        place = token[None, :] * HALF + frequency[:, None]
        near_c = tl.load(near_cos + place, mask=in_half[:, None], other=0.0)
        near_s = tl.load(near_sin + place, mask=in_half[:, None], other=0.0)
        start = tl.load(first + row)
    low, high = tl.load(begin + row), tl.load(end + row)
    peak = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VALUE_COLUMNS], tl.float32)
    last = tl.minimum((part + 1) * pages_each, tl.minimum(pages, tl.cdiv(high, TOKENS).to(tl.int32)))
    for page in range(tl.maximum(part * pages_each, (low // TOKENS).to(tl.int32)), last):
        page_id = tl.load(key_pages + row * pages + page)
        scales = key_scale + tl.load(key_scale_pages + row * pages + page) * key_scale_page + head * TOKENS * KEY_SCALES
        codes = key_codes + page_id * key_page
        keys = decoded_rows(codes, scales, key_table, head, token, KEY_FORMAT, KEY_BITS, DIM, KEY_COLUMNS)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if KEY_STEPPED:
            scores *= tl.load(key_step + unit)
        if KEY_SCALED:
            scores *= tl.load(scales + token * KEY_SCALES).to(tl.float32)[None, :]
        if HALF > 0:
            angle = (start + page * TOKENS) * HALF + frequency
            page_c, page_s = (
                tl.load(cos + angle, mask=in_half, other=0.0),
                tl.load(sin + angle, mask=in_half, other=0.0),
            )
            scores += tl.dot(a * page_c[None, :] + b * page_s[None, :], near_c, input_precision="tf32x3")
            scores += tl.dot(b * page_c[None, :] - a * page_s[None, :], near_s, input_precision="tf32x3")
            scores += c[:, None]
        place_in_row = page * TOKENS + token
        lives = (place_in_row >= low) & (place_in_row < high)
        scores = tl.where(lives[None, :], scores, float("-inf"))
        page_id = tl.load(value_pages + row * pages + page)
        scales = value_scale + tl.load(value_scale_pages + row * pages + page) * value_scale_page
        scales += head * TOKENS * VALUE_SCALES
        codes, table = value_codes + page_id * value_page, value_table + row * VALUE_ENTRIES
        values = decoded_rows(codes, scales, table, head, token, VALUE_FORMAT, VALUE_BITS, DIM, VALUE_COLUMNS)
        scale = tl.full([TOKENS], 1.0, tl.float32)
        if VALUE_SCALED:
            scale = tl.load(scales + token * VALUE_SCALES).to(tl.float32)
        peak, total, acc = add_tokens(q, scores, lives, values, scale, peak, total, acc, VALUE_SCALED)
    target = (unit * tl.num_programs(1) + part) * GROUP
    store_part(out, lse, target, peak, total, acc, GROUP, GROUP_BLOCK, VALUE_COLUMNS)


@triton.jit
def add_tokens(q, scores, lives, values, scale, peak, total, acc, SCALED: tl.constexpr):
    """Adds 64 tokens to an online softmax. Returns the largest scores, the sums of weights and the sums of weighted
    values. Scores are base-2 exponents, -inf for tokens that are not attended to."""
    peak, total, faded, weights = weighed_tokens(scores, peak, total)
    return peak, total, add_values(q, weights, faded, lives, values, scale, acc, SCALED)


@triton.jit
def weighed_tokens(scores, peak, total):
    """Adds scores to an online softmax, as ``add_tokens``. Returns the largest scores, the sums of weights, the factors
    by which earlier sums fade, and the weights."""
    most = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp2(scores - base[:, None])
    faded = tl.exp2(peak - base)
    return most, total * faded + tl.sum(weights, 1), faded, weights


@triton.jit
def add_values(q, weights, faded, lives, values, scale, acc, SCALED: tl.constexpr):
    """Adds values of 64 tokens to sums, with the results of ``weighed_tokens``. Returns the sums."""
    values = tl.where(lives[:, None], values, 0.0)
    if SCALED:
        scale = tl.where(lives, scale, 0.0)
        # Products of weights and scales are divided by the largest scale, because in float16 the product of a small
        # weight and a small scale could vanish.
        largest = tl.max(scale, 0)
        largest = tl.where(largest > 0, largest, 1.0)
        weights *= (scale / largest)[None, :]
        weighed = tl.dot(weights.to(q.dtype), values.to(q.dtype), input_precision="ieee") * largest
    else:
        weighed = tl.dot(weights.to(q.dtype), values.to(q.dtype), input_precision="ieee")
    return acc * faded[:, None] + weighed


@triton.jit
def store_part(
    out, lse, target, peak, total, acc, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Stores the result of one part for all query heads, from row ``target`` of ``out`` and ``lse`` on: all columns, or
    those from ``FIRST`` on that ``acc`` has."""
    member, column = tl.arange(0, GROUP_BLOCK), FIRST + tl.arange(0, acc.shape[1])
    alive = member < GROUP
    found = total != 0  # NaN must propagate
    acc = acc / tl.where(found, total, 1.0)[:, None]
    sums = tl.where(found, (peak + tl.log2(tl.where(found, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(out + (target + member)[:, None] * COLUMNS + column[None, :], acc, mask=alive[:, None])
    tl.store(lse + target + member, sums, mask=alive)
