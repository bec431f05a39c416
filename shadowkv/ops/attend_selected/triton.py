"""Attention over selected tokens, with keys as latents, in Triton. It serves what the CUDA kernels do not support:
latents of mixed widths, more formats of values, and RoPE that rotates pairs of neighbouring dimensions or a number of
dimensions that is not a multiple of 16.

A program takes 64 tokens of one kv head at a time, with all query heads of this kv head. It rebuilds keys from latents
in two products: one for the first dimensions of RoPE's pairs, one for the second.

Whole keys of more than 256 dimensions would not fit into registers. Of such keys, only the dimensions that RoPE rotates
are rebuilt. The others are the same at all positions, so queries are multiplied with their part of the basis instead,
once per step, and the products with latents (the weight absorption of MLA, arXiv:2405.04434).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.attend_coded.triton import add_values, store_part, thread_blocks, weighed_tokens
from shadowkv.ops.attend_coded.triton_rows import TOKENWISE, StoredForm, codes_of, decoded_rows
from shadowkv.ops.attend_selected.sources import BufferedRows, CodedRows, KeySource, LatentKeys, ValueSource
from shadowkv.ops.attention_results import attend_to_nothing
from shadowkv.ops.case import Case, unless
from shadowkv.ops.codec import FIXED_WIDTH_LATENTS, CodecId
from shadowkv.ops.page import PAGE
from shadowkv.ops.rebuild_rows.triton import decoded_latents, places_of_bits
from shadowkv.ops.triton_sizes import LARGEST_HEAD, TOKENS, dot_size

KEYS = (*FIXED_WIDTH_LATENTS, CodecId.LATENT_MIXED)
VALUES = (CodecId.DENSE, *TOKENWISE)

WIDEST = 512
"""Largest head dim."""

COLUMNS_AT_ONCE = 128
"""Columns of values that are decoded at a time, if heads have more than 256 dimensions."""


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    return [
        *unless(case.key_codec in KEYS, f"codec {case.key_codec} of keys is not for latents"),
        *unless(case.value_codec in VALUES, f"codec {case.value_codec} of values is unknown"),
        *unless(not case.fetched_bytes, "values are in a buffer"),
        *unless(case.head_dim <= WIDEST, f"head dim {case.head_dim} is above {WIDEST}"),
    ]


def attend_selected(
    q: Tensor,
    keys: KeySource,
    values: ValueSource,
    selected: Tensor,
    log_weight: Tensor | None = None,
    most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as the reference, for keys as latents and values with a codec in ``VALUES`` that are not in a buffer.

    If queries have 16 bits, scores and weighted values are products of float16 operands. The latents of a page are
    contiguous, as are the values of a head in a page.

    Raises:
        ValueError: keys or values in other formats.
    """
    batch, query_heads, dim = q.shape
    if not isinstance(keys, LatentKeys) or isinstance(values, BufferedRows):
        given = f"{type(keys).__name__} and {type(values).__name__}"
        raise ValueError(f"attend_selected in Triton takes latents, and values outside a buffer, not {given}")
    if isinstance(values, CodedRows) and values.codec.id not in VALUES:
        raise ValueError(f"attend_selected in Triton does not know codec {values.codec.name!r} ({values.codec.id})")
    keys, (heads, chunks) = keys.decoded(), selected.shape[1:]
    if not selected.numel():
        return attend_to_nothing(q)
    group, half, rope = query_heads // heads, dim // 2, keys.rotary.config
    exact = torch.float32 if q.dtype == torch.float32 else torch.float16
    asked = (q.float() * (dim**-0.5 * math.log2(math.e))).to(exact)
    form, codes, latents, basis = StoredForm(values, dim, exact), codes_of(values), keys.latents, keys.basis
    chunk = latents.shape[2]
    bits, bit = places_of_bits(keys)
    absorbed = dim > LARGEST_HEAD
    pairs = rope.rotating_pairs if absorbed else half
    still = _absorb(asked, keys, pairs) if absorbed else (asked, asked)
    at_once = COLUMNS_AT_ONCE if absorbed and form.format != "blocks" else form.columns
    tiles = triton.cdiv(chunks * chunk, PAGE)
    parts = thread_blocks(batch * heads, tiles, q.device)
    out = torch.empty(batch, heads, parts, group, form.columns, dtype=torch.float32, device=q.device)
    lse = out.new_empty(batch, heads, parts, group)
    _attend_latents[(batch * heads, parts)](
        asked, *still, selected.contiguous(), selected if log_weight is None else log_weight.contiguous(),
        latents, keys.pages.contiguous(), bits, bit, basis, basis if keys.mean is None else keys.mean,
        keys.states, keys.first, keys.rotary.cos, keys.rotary.sin,
        codes, form.scale, values.pages.contiguous(), form.scale_pages.contiguous(), form.table, out, lse,
        latents.stride(0), basis.stride(0), 0 if keys.mean is None else keys.mean.stride(0),
        codes.stride(0), form.scale.stride(0), keys.pages.shape[1], chunks, tiles, triton.cdiv(tiles, parts),
        SAMPLED=log_weight is not None, MIXED=keys.widths is not None, PACKED=keys.codec.id == CodecId.LATENT_INT4,
        HAS_MEAN=keys.mean is not None, HEADS=heads, GROUP=group,
        GROUP_BLOCK=dot_size(group), DIM=dim, CHUNK=chunk, WIDTH=latents.shape[3],
        RANK=basis.shape[1], HALF=half, PAIRS=pairs, PAIRS_BLOCK=dot_size(pairs), ROPE_HALF=rope.dim // 2,
        INTERLEAVED=rope.interleaved, ABSORBED=absorbed,
        VALUE_FORMAT=form.format, VALUE_BITS=form.bits, VALUE_COLUMNS=form.columns, VALUE_SCALED=form.scaled,
        VALUE_ENTRIES=form.row_entries, AT_ONCE=at_once,
        num_warps=8 if absorbed else 4,
    )  # fmt: skip
    return form.merged(out, lse, q.dtype)


def _absorb(asked: Tensor, keys: LatentKeys, pairs: int) -> tuple[Tensor, Tensor]:
    """Multiplies the dimensions of queries [B, H_q, d] that do not rotate, all but the first ``pairs`` pairs, with the
    basis and the mean of their keys. Returns the products with the basis [B, H_q, r], in the dtype of the queries, and
    those with the mean, float32 [B, H_q]."""
    (batch, query_heads, dim), (_, rank, heads, _) = asked.shape, keys.basis.shape
    group, rope = query_heads // heads, keys.rotary.config
    of_basis = asked.new_empty(batch, query_heads, rank)
    of_mean = asked.new_empty(batch, query_heads, dtype=torch.float32)
    _multiply_basis[(batch * heads, triton.cdiv(rank, 32))](
        asked, keys.basis, keys.basis if keys.mean is None else keys.mean, keys.states, of_basis, of_mean,
        keys.basis.stride(0), 0 if keys.mean is None else keys.mean.stride(0),
        HAS_MEAN=keys.mean is not None, HEADS=heads, GROUP=group, GROUP_BLOCK=dot_size(group), DIM=dim,
        DIM_BLOCK=dot_size(dim), RANK=rank, ROPE_HALF=rope.dim // 2, PAIRS=pairs, INTERLEAVED=rope.interleaved,
        PRECISION="ieee" if asked.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return of_basis, of_mean


@triton.jit(do_not_specialize_on_alignment=["states"])
def _multiply_basis(
    asked, basis, mean, states, of_basis, of_mean, basis_state, mean_state, HAS_MEAN: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    RANK: tl.constexpr, ROPE_HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiplies the queries of one kv head of a row with 32 rank dimensions of the basis."""
    unit, rank = tl.program_id(0).to(tl.int64), tl.program_id(1) * 32 + tl.arange(0, 32)
    row, head = unit // HEADS, unit % HEADS
    member, dim = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    if INTERLEAVED:
        still = (dim >= 2 * PAIRS) & (dim < DIM)
    else:
        rotates = (dim < 2 * ROPE_HALF) & (dim % ROPE_HALF < PAIRS)
        still = (dim < DIM) & (rotates == 0)
    there = (member < GROUP)[:, None]
    place = unit * GROUP + member
    q = tl.load(asked + place[:, None] * DIM + dim[None, :], mask=there & still[None, :], other=0.0).to(tl.float32)
    state = tl.load(states + row)
    direction = basis + state * basis_state + rank[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    rows = tl.load(direction, mask=(rank < RANK)[:, None] & still[None, :], other=0.0).to(tl.float32)
    products = tl.dot(q, tl.trans(rows), input_precision=PRECISION)
    target = of_basis + place[:, None] * RANK + rank[None, :]
    tl.store(target, products.to(of_basis.dtype.element_ty), mask=there & (rank < RANK)[None, :])
    if HAS_MEAN:
        centre = tl.load(mean + state * mean_state + head * DIM + dim, mask=still, other=0.0).to(tl.float32)
        # All programs of a kv head store the same numbers.
        tl.store(of_mean + place, tl.sum(q * centre[None, :], 1), mask=member < GROUP)


@triton.jit(
    do_not_specialize=["pages", "chunks", "tiles", "tiles_each"],
    do_not_specialize_on_alignment=["key_pages", "states", "value_pages", "value_scale_pages", "pages"],
)
def _attend_latents(
    asked, of_basis, of_mean, selected, log_weight, latents, key_pages, bits, bit, basis, mean, states, first, cos, sin,
    value_codes, value_scale, value_pages, value_scale_pages, value_table, out, lse,
    latent_page, basis_state, mean_state, value_page, value_scale_page, pages, chunks, tiles, tiles_each,
    SAMPLED: tl.constexpr, MIXED: tl.constexpr, PACKED: tl.constexpr, HAS_MEAN: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, PAIRS_BLOCK: tl.constexpr,
    ROPE_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ABSORBED: tl.constexpr,
    VALUE_FORMAT: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, VALUE_SCALED: tl.constexpr,
    VALUE_ENTRIES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Attends to one part of the selected tokens of one kv head of a row. If ``ABSORBED``, only the first ``PAIRS``
    pairs of keys are rebuilt, which rotate, and ``of_basis`` and ``of_mean`` are the results of ``_absorb``."""
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = unit // HEADS, unit % HEADS
    member, at, pair = tl.arange(0, GROUP_BLOCK), tl.arange(0, TOKENS), tl.arange(0, PAIRS_BLOCK)
    in_pair = pair < PAIRS
    one, other = _dimensions(pair, HALF, ROPE_HALF, INTERLEAVED, ABSORBED)
    of_member = asked + (unit * GROUP + member[:, None]) * DIM
    there = (member < GROUP)[:, None] & in_pair[None, :]
    q_one = tl.load(of_member + one[None, :], mask=there, other=0.0)
    q_other = tl.load(of_member + other[None, :], mask=there, other=0.0)
    state, start = tl.load(states + row), tl.load(first + row)
    peak = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    accs = ()
    for _ in tl.static_range(VALUE_COLUMNS // AT_ONCE):
        accs = accs + (tl.zeros([GROUP_BLOCK, AT_ONCE], tl.float32),)
    for tile in range(part * tiles_each, tl.minimum((part + 1) * tiles_each, tiles)):
        number = (tile * TOKENS + at) // CHUNK
        chunk = tl.load(selected + unit * chunks + number, mask=number < chunks, other=-1)
        lives = chunk >= 0
        position = tl.where(lives, chunk * CHUNK + at % CHUNK, 0)
        place = position % TOKENS
        stored = latents + tl.load(key_pages + row * pages + position // TOKENS) * latent_page + place * WIDTH
        k_one, k_other, scores = _rebuild_pairs(
            stored, lives, bits + row * RANK, bit + row * RANK, basis + state * basis_state + head * DIM,
            of_basis + unit * GROUP * RANK, one, other, in_pair, GROUP, GROUP_BLOCK, HEADS * DIM, WIDTH, RANK,
            PACKED, MIXED, ABSORBED,
        )  # fmt: skip
        if HAS_MEAN:
            centre = mean + state * mean_state + head * DIM
            k_one += tl.load(centre + one, mask=in_pair, other=0.0).to(tl.float32)[None, :]
            k_other += tl.load(centre + other, mask=in_pair, other=0.0).to(tl.float32)[None, :]
        angle = (start + position)[:, None] * ROPE_HALF + pair[None, :]
        in_rope = lives[:, None] & (pair < ROPE_HALF)[None, :]
        cosine, sine = tl.load(cos + angle, mask=in_rope, other=1.0), tl.load(sin + angle, mask=in_rope, other=0.0)
        rope_one, rope_other = k_one * cosine - k_other * sine, k_other * cosine + k_one * sine
        scores += tl.dot(q_one, tl.trans(rope_one.to(q_one.dtype)), input_precision="ieee")
        scores += tl.dot(q_other, tl.trans(rope_other.to(q_one.dtype)), input_precision="ieee")
        if ABSORBED and HAS_MEAN:
            scores += tl.load(of_mean + unit * GROUP + member, mask=member < GROUP, other=0.0)[:, None]
        if SAMPLED:
            weight = tl.load(log_weight + unit * chunks + number, mask=lives, other=0.0)
            scores += (weight * 1.4426950408889634)[None, :]
        scores = tl.where(lives[None, :], scores, float("-inf"))
        page_id = tl.load(value_pages + row * pages + position // TOKENS)
        rows = value_codes + (page_id * value_page)[:, None]
        table = value_table + row * VALUE_ENTRIES
        scale = tl.full([TOKENS], 1.0, tl.float32)
        if VALUE_SCALED:
            page_id = tl.load(value_scale_pages + row * pages + position // TOKENS)
            scale = tl.load(value_scale + page_id * value_scale_page + head * TOKENS + place).to(tl.float32)
        peak, total, faded, weights = weighed_tokens(scores, peak, total)
        added = ()
        for number in tl.static_range(VALUE_COLUMNS // AT_ONCE):
            values = decoded_rows(
                rows, value_scale, table, head, place, VALUE_FORMAT, VALUE_BITS, DIM, VALUE_COLUMNS,
                number * AT_ONCE, AT_ONCE,
            )  # fmt: skip
            added = added + (add_values(q_one, weights, faded, lives, values, scale, accs[number], VALUE_SCALED),)
        accs = added
    target = (unit * tl.num_programs(1) + part) * GROUP
    for number in tl.static_range(VALUE_COLUMNS // AT_ONCE):
        store_part(
            out, lse, target, peak, total, accs[number], GROUP, GROUP_BLOCK, VALUE_COLUMNS, number * AT_ONCE
        )  # fmt: skip


@triton.jit
def _dimensions(
    pair, HALF: tl.constexpr, ROPE_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ABSORBED: tl.constexpr
):  # fmt: skip
    """Returns the first and the second dimension of each pair: of those that RoPE rotates, and unless ``ABSORBED``, of
    pairs of the other dimensions after them."""
    if ABSORBED:
        one = 2 * pair if INTERLEAVED else pair
        other = 2 * pair + 1 if INTERLEAVED else pair + ROPE_HALF
    elif INTERLEAVED:
        one = tl.where(pair < ROPE_HALF, 2 * pair, pair + ROPE_HALF)
        other = tl.where(pair < ROPE_HALF, 2 * pair + 1, pair + HALF)
    elif ROPE_HALF < HALF:
        one = tl.where(pair < ROPE_HALF, pair, pair + ROPE_HALF)
        other = tl.where(pair < ROPE_HALF, pair + ROPE_HALF, pair + HALF)
    else:
        one = pair
        other = pair + HALF
    return one, other


@triton.jit
def _rebuild_pairs(
    stored, lives, bits, bit, basis, of_basis, one, other, in_pair, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    ROW: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, PACKED: tl.constexpr, MIXED: tl.constexpr,
    ABSORBED: tl.constexpr,
):  # fmt: skip
    """Rebuilds pairs of dimensions of 64 keys, without their mean. Returns the first dimensions and the second ones,
    and, if ``ABSORBED``, the scores of the other dimensions, otherwise zeros. ``basis`` and ``of_basis`` point to the
    rows of the kv head, which are ``ROW`` elements apart, and to its queries' products."""
    k_one = tl.zeros((TOKENS, one.shape[0]), tl.float32)
    k_other = tl.zeros((TOKENS, one.shape[0]), tl.float32)
    scores = tl.zeros((GROUP_BLOCK, TOKENS), tl.float32)
    member = tl.arange(0, GROUP_BLOCK)[:, None]
    for block in range(0, RANK, 32):
        rank = block + tl.arange(0, 32)
        in_rank = rank < RANK
        wanted = lives[:, None] & in_rank[None, :]
        x = decoded_latents(stored[:, None], rank, wanted, bits, bit, RANK, WIDTH, PACKED, MIXED)
        direction = basis + rank[:, None] * ROW
        inside = in_rank[:, None] & in_pair[None, :]
        b_one = tl.load(direction + one[None, :], mask=inside, other=0.0)
        b_other = tl.load(direction + other[None, :], mask=inside, other=0.0)
        k_one = tl.dot(x.to(b_one.dtype), b_one, k_one, input_precision="ieee")
        k_other = tl.dot(x.to(b_one.dtype), b_other, k_other, input_precision="ieee")
        if ABSORBED:
            there = (member < GROUP) & in_rank[None, :]
            absorbed = tl.load(of_basis + member * RANK + rank[None, :], mask=there, other=0.0)
            x = tl.where(wanted, x, 0).to(absorbed.dtype)
            scores = tl.dot(absorbed, tl.trans(x), scores, input_precision="ieee")
    return k_one, k_other, scores
