"""Scores of blocks by pooled keys, in Triton. A program reads the index keys of up to 16 blocks once and copies none of
them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.case import Case, unless
from shadowkv.ops.page import PAGE
from shadowkv.ops.pooled_scores.reference import KeyNorm

BLOCKS = 16
"""Maximum number of blocks that a program scores."""


def supports(case: Case) -> list[str]:
    """Reasons why the kernel cannot serve ``case``."""
    return unless(not case.interleaved, "RoPE rotates neighbouring dimensions")


def pooled_scores(
    queries: Tensor, keys: Tensor, pages: Tensor, first: Tensor, norm: KeyNorm, rotary: RotaryTables, size: int
) -> Tensor:
    """Same as the reference, with another order of sums. Keys of a page are contiguous. RoPE must not be
    interleaved."""
    (rows, heads, dim), count, config = queries.shape, pages.shape[1], rotary.config
    of_page = PAGE // size
    scores = torch.empty(rows, count, of_page, dtype=torch.float32, device=queries.device)
    if not rows * count:
        return scores
    together, half = min(BLOCKS, of_page), config.dim // 2
    _score[(count * of_page // together, rows)](
        queries.contiguous(), keys, pages.contiguous(), first.contiguous(), norm.weight, rotary.cos, rotary.sin, scores,
        keys.stride(0), count, norm.dim, norm.eps, SIZE=size, BLOCKS=together, PARTS=of_page // together, HEADS=heads,
        DIM=dim, HALF=half, HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(max(1, dim - config.dim)),
    )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["pages", "first"])
def _score(
    queries, keys, pages, first, weight, cos, sin, scores, page_stride, count, dim, eps, SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores a part of a page. ``a`` and ``b`` are the first and the second dimensions of the pairs that RoPE rotates,
    ``c`` the dimensions that it does not rotate."""
    row, place = tl.program_id(1).to(tl.int64), tl.program_id(1).to(tl.int64) * count + tl.program_id(0) // PARTS
    block = tl.program_id(0) % PARTS * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    source = keys + tl.load(pages + place) * page_stride + block * (SIZE * DIM)
    pair, rest = tl.arange(0, HALF_BLOCK)[None, :], 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    turns, stays = pair < HALF, rest < DIM
    a = _mean(source + pair, turns, SIZE, DIM)
    b = _mean(source + HALF + pair, turns, SIZE, DIM)
    c = _mean(source + rest, stays, SIZE, DIM)
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
    scale = tl.rsqrt(squares / dim + eps)[:, None]
    a = _rounded(a * scale * tl.load(weight + pair, mask=turns, other=0.0).to(tl.float32), keys)
    b = _rounded(b * scale * tl.load(weight + HALF + pair, mask=turns, other=0.0).to(tl.float32), keys)
    c = _rounded(c * scale * tl.load(weight + rest, mask=stays, other=0.0).to(tl.float32), keys)
    angle = (tl.load(first + place) + block * SIZE) * HALF + pair
    cosine, sine = tl.load(cos + angle, mask=turns, other=0.0), tl.load(sin + angle, mask=turns, other=0.0)
    a, b = _rounded(a * cosine - b * sine, keys), _rounded(b * cosine + a * sine, keys)
    total = tl.zeros([BLOCKS], tl.float32)
    for head in range(HEADS):
        query = queries + (row * HEADS + head) * DIM
        product = tl.sum(a * tl.load(query + pair, mask=turns, other=0.0).to(tl.float32), 1)
        product += tl.sum(b * tl.load(query + HALF + pair, mask=turns, other=0.0).to(tl.float32), 1)
        product += tl.sum(c * tl.load(query + rest, mask=stays, other=0.0).to(tl.float32), 1)
        total += tl.maximum(product, 0.0)
    number = tl.program_id(0) % PARTS * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(scores + place * (PARTS * BLOCKS) + number, total)


@triton.jit
def _mean(places, there, SIZE: tl.constexpr, DIM: tl.constexpr):
    """The mean of ``SIZE`` tokens at ``places``, rounded to their dtype, as float32."""
    total = tl.load(places, mask=there, other=0.0).to(tl.float32)
    for token in tl.static_range(1, SIZE):
        total += tl.load(places + token * DIM, mask=there, other=0.0).to(tl.float32)
    return _rounded(total / SIZE, places)


@triton.jit
def _rounded(x, like):
    """``x`` rounded to the dtype of the numbers that ``like`` points to, as float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)
