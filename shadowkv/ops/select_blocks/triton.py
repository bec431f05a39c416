"""Selection of blocks in four Triton kernels. They sample queries, score the keys that tiles always attend to, score
the other blocks, and sample blocks."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.select_blocks.reference import (
    BLOCK,
    FACTORS,
    HALVINGS,
    LOCAL_BLOCKS,
    MIN_BLOCKS,
    SAMPLED,
    SINK_BLOCKS,
    SPREAD,
    Blocks,
)
from shadowkv.ops.triton_sizes import dot_size

SPAN = 32
"""Blocks of keys that a program scores."""

AT_ONCE = 64
"""Blocks of keys that are sampled at a time."""


def supports(case: Case) -> list[str]:
    """Why the kernels cannot serve a case: sampled queries and blocks of keys must fit in shared memory."""
    row = triton.next_power_of_2(case.head_dim) * case.dtype.itemsize
    blocks = 4 if case.capability is not None and case.capability >= (9, 0) else 3
    need = blocks * BLOCK * row + 2048
    return unless(
        need <= case.block_memory, f"a thread block has {case.block_memory} bytes of shared memory, not {need}"
    )


def select_blocks(q: Tensor, k: Tensor, error: float, whole: int = 0, seed: int = 0) -> Blocks:
    """Same as the reference, except for blocks at which the sum of probabilities is very close to a whole number.
    Products are summed in float32."""
    scores, sampled = score_buffer(q, k), sample_queries(q)
    score_blocks(q, k, sampled, scores)
    return draw_blocks(scores, score_attended(q, k, sampled), q, k, error, whole, seed)


def tiles_together(group: int) -> int:
    """Returns the number of tiles that are scored together. A tile has ``SAMPLED`` queries for each of the ``group``
    query heads of a kv head."""
    return max(1, 128 // (group * SAMPLED))


def score_buffer(q: Tensor, k: Tensor) -> Tensor:
    """Returns an uninitialised tensor for the scores of ``score_blocks``, float32 [blocks, H, parts, rows].

    A part consists of ``tiles_together`` tiles. Its rows are the sampled queries of these tiles and of one kv head's
    query heads, and perhaps padding.
    """
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    together = tiles_together(group)
    rows = dot_size(together * group * SAMPLED)
    parts = triton.cdiv(triton.cdiv(len(q), BLOCK), together)
    shape = triton.cdiv(len(k), BLOCK), heads, parts, rows
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def score_blocks(q: Tensor, k: Tensor, sampled: Tensor, scores: Tensor) -> None:
    """Scores the blocks that a tile may leave out, and some others. There is a score for each sampled query and block:
    log2 of the sum of the exponentials of the query's logits over the block's keys.

    Args:
        q, k: [n, H_q, d] and [m, H, d], as for ``select_blocks``. The last dimension is contiguous.
        sampled: int32 [H_q, tiles, ``SAMPLED``], rows of ``q``, from ``sample_queries``.
        scores: float32 [blocks, H, parts, rows], from ``score_buffer``. Written.
    """
    n, query_heads, dim = q.shape
    blocks, heads, parts, rows = scores.shape
    group = query_heads // heads
    _score[(parts, heads, triton.cdiv(blocks, SPAN))](
        q, k, sampled, scores, n, len(k), triton.cdiv(n, BLOCK), dim**-0.5 * math.log2(math.e), *q.stride()[:2],
        *k.stride()[:2], DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), GROUP=group, TOGETHER=tiles_together(group),
        ROWS=rows, SPAN=SPAN, BLOCK=BLOCK, SAMPLED=SAMPLED, LOCAL=LOCAL_BLOCKS, EXACT=q.dtype == torch.float32,
        num_warps=8,
    )  # fmt: skip


def score_attended(q: Tensor, k: Tensor, sampled: Tensor) -> Tensor:
    """Scores the keys that a tile always attends to, float32 [H_q, tiles, ``SAMPLED``]. There is a score for each
    sampled query: log2 of the sum of the exponentials of its logits over those keys, up to the query's own position.
    Arguments as for ``score_blocks``."""
    n, query_heads, dim = q.shape
    heads, tiles = k.shape[1], triton.cdiv(n, BLOCK)
    group = query_heads // heads
    attended = torch.empty(query_heads, tiles, SAMPLED, dtype=torch.float32, device=q.device)
    _score_attended[(tiles, heads)](
        q, k, sampled, attended, n, len(k), dim**-0.5 * math.log2(math.e), *q.stride()[:2], *k.stride()[:2], DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim), GROUP=group, ROWS=dot_size(group * SAMPLED),
        BLOCK=BLOCK, SAMPLED=SAMPLED, SINK=SINK_BLOCKS, LOCAL=LOCAL_BLOCKS, EXACT=q.dtype == torch.float32,
    )  # fmt: skip
    return attended


def draw_blocks(scores: Tensor, attended: Tensor, q: Tensor, k: Tensor, error: float, whole: int, seed: int) -> Blocks:
    """Samples blocks: the result of ``select_blocks``.

    Args:
        scores: float32 [blocks, H, parts, rows], written by ``score_blocks``.
        attended: float32 [H_q, tiles, ``SAMPLED``], from ``score_attended``.
        q, k, error, whole, seed: as for ``select_blocks``.
    """
    n, query_heads, m, heads = *q.shape[:2], *k.shape[:2]
    group, tiles, (blocks, _, parts, rows) = query_heads // heads, triton.cdiv(n, BLOCK), scores.shape
    indices = torch.empty(query_heads, tiles, blocks, dtype=torch.int32, device=q.device)
    counts = torch.empty(query_heads, tiles, dtype=torch.int32, device=q.device)
    weights = torch.empty(query_heads, tiles, blocks, dtype=torch.float32, device=q.device)
    _draw[(tiles, query_heads)](
        scores, attended, indices, counts, weights, n, m, whole if error else n, heads, parts, blocks, error**2, seed,
        GROUP=group, TOGETHER=tiles_together(group), ROWS=rows, BLOCK=BLOCK, SAMPLED=SAMPLED, SINK=SINK_BLOCKS,
        LOCAL=LOCAL_BLOCKS, LEAST=MIN_BLOCKS, AT_ONCE=AT_ONCE, FACTORS=FACTORS, HALVINGS=HALVINGS, num_warps=1,
    )  # fmt: skip
    return indices, counts, weights


def sample_queries(q: Tensor) -> Tensor:
    """Same as the reference, except for queries at nearly equal distances. Products are summed in float32."""
    n, query_heads, dim = q.shape
    tiles = triton.cdiv(n, BLOCK)
    sampled = torch.empty(query_heads, tiles, SAMPLED, dtype=torch.int32, device=q.device)
    _sample[(tiles, query_heads)](
        q, sampled, n, *q.stride()[:2], DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), BLOCK=BLOCK, SAMPLED=SAMPLED,
        SPREAD=SPREAD, EXACT=q.dtype == torch.float32, num_warps=8,
    )  # fmt: skip
    return sampled


@triton.jit(do_not_specialize=["n"])
def _sample(
    q, sampled, n, q_token, q_head, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr, SPREAD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Samples the queries of one tile of one head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    within, dim = tl.arange(0, BLOCK), tl.arange(0, DIM_BLOCK)
    token = tile * BLOCK + within
    rows = tl.load(
        q + token.to(tl.int64)[:, None] * q_token + head * q_head + dim[None, :],
        mask=(token < n)[:, None] & (dim < DIM)[None, :], other=0.0,
    )  # fmt: skip
    products = tl.dot(rows, tl.trans(rows), input_precision="ieee" if EXACT else "tf32")
    squares = tl.sum(tl.where(within[:, None] == within[None, :], products, 0.0), 1)
    apart = squares[:, None] + squares[None, :] - 2 * products
    nearest = tl.full([BLOCK], float("inf"), tl.float32)
    out = sampled + (head * tl.num_programs(0) + tile) * SAMPLED
    for number in range(SAMPLED):
        spread = tl.minimum(BLOCK // SPREAD * (number + 1), n - tile * BLOCK) - 1
        farthest = tl.argmax(tl.where(token < n, nearest, float("-inf")), 0).to(tl.int32)
        newest = tl.where(number < SPREAD, spread, farthest)
        tl.store(out + number, tile * BLOCK + newest)
        nearest = tl.minimum(nearest, tl.sum(tl.where(within[None, :] == newest, apart, 0.0), 1))


@triton.jit(do_not_specialize=["n", "m", "tiles"])
def _score(
    q, k, sampled, scores, n, m, tiles, scale, q_token, q_head, k_token, k_head, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, SAMPLED: tl.constexpr, LOCAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``score_blocks`` for the tiles of one part, one head, and a span of blocks."""
    part, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    tile = part * TOGETHER + row // (SAMPLED * GROUP)
    member, sample = row % (SAMPLED * GROUP) // SAMPLED, row % SAMPLED
    lives = (row < TOGETHER * SAMPLED * GROUP) & (tile < tiles)
    token = tl.load(sampled + ((head * GROUP + member) * tiles + tile) * SAMPLED + sample, mask=lives, other=0)
    dim = tl.arange(0, DIM_BLOCK)
    queries = tl.load(
        q + token.to(tl.int64)[:, None] * q_token + (head * GROUP + member)[:, None] * q_head + dim[None, :],
        mask=lives[:, None] & (dim < DIM)[None, :], other=0.0,
    )  # fmt: skip
    last = (m - n + tl.minimum(part * TOGETHER + TOGETHER, tiles) * BLOCK - BLOCK) // BLOCK - LOCAL
    within = tl.arange(0, BLOCK)
    out = scores + ((span.to(tl.int64) * SPAN * tl.num_programs(1) + head) * tl.num_programs(0) + part) * ROWS + row
    step = tl.num_programs(1) * tl.num_programs(0) * ROWS
    rows = k + head * k_head + (span * SPAN * BLOCK + within).to(tl.int64)[:, None] * k_token + dim[None, :]
    for _ in range(span * SPAN, tl.minimum(span * SPAN + SPAN, last + 1)):
        if DIM == DIM_BLOCK:
            keys = tl.load(rows)
        else:
            keys = tl.load(rows, mask=(dim < DIM)[None, :], other=0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee" if EXACT else "tf32") * scale
        peak = tl.max(products, 1)
        total = peak + tl.log2(tl.sum(tl.exp2(products - peak[:, None]), 1))
        tl.store(out, total, mask=lives)
        rows += BLOCK * k_token
        out += step


@triton.jit(do_not_specialize=["n", "m"])
def _score_attended(
    q, k, sampled, attended, n, m, scale, q_token, q_head, k_token, k_head, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr, SINK: tl.constexpr,
    LOCAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``score_attended`` for one tile and all query heads of one kv head."""
    tile, head, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.arange(0, ROWS)
    lives = row < GROUP * SAMPLED
    place = ((head * GROUP + row // SAMPLED) * tiles + tile) * SAMPLED + row % SAMPLED
    token = tl.load(sampled + place, mask=lives, other=0)
    dim, within = tl.arange(0, DIM_BLOCK), tl.arange(0, BLOCK)
    queries = tl.load(
        q + token.to(tl.int64)[:, None] * q_token + (head * GROUP + row // SAMPLED)[:, None] * q_head + dim[None, :],
        mask=lives[:, None] & (dim < DIM)[None, :], other=0.0,
    )  # fmt: skip
    first = m - n + tile * BLOCK
    end = (tl.minimum(first + BLOCK, m) - 1) // BLOCK + 1
    newest = tl.maximum(first // BLOCK - LOCAL + 1, SINK)  # always attended to, like the first SINK blocks
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for number in range(0, tl.minimum(SINK, end) + tl.maximum(end - newest, 0)):
        block = tl.where(number < SINK, number, newest + number - SINK)
        key = block * BLOCK + within
        keys = tl.load(
            k + key.to(tl.int64)[:, None] * k_token + head * k_head + dim[None, :],
            mask=(key < m)[:, None] & (dim < DIM)[None, :], other=0.0,
        )  # fmt: skip
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee" if EXACT else "tf32") * scale
        products = tl.where(key[None, :] <= (m - n + token)[:, None], products, float("-inf"))
        higher = tl.maximum(peak, tl.max(products, 1))  # every query sees a key in the first block
        total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(products - higher[:, None]), 1)
        peak = higher
    tl.store(attended + place, peak + tl.log2(total), mask=lives)


@triton.jit
def _add_block(varies, drawn, squared, expected):
    """Adds the terms of some blocks to the variances of the sampled queries' sums, and to the expected number of
    sampled blocks. Returns both."""
    probability = tl.minimum(expected, 1.0)
    missed = tl.where(expected > 0, 1 / tl.maximum(probability, 1e-30) - 1, 0.0)
    return varies + squared * missed[:, None], drawn + probability


@triton.jit
def _too_small(varies, drawn, variance, needed):
    """Returns 1 if a factor is too small, else 0. It is too small if a query's variance is above the limit, or if too
    few blocks are expected."""
    return 1 - ((tl.max(tl.sum(varies, 0), 0) <= variance) & (tl.sum(drawn, 0) >= needed)).to(tl.int32)


@triton.jit(do_not_specialize=["n", "m", "whole", "parts", "blocks", "seed"])
def _draw(
    scores, attended, indices, counts, weights, n, m, whole, heads, parts, blocks, variance, seed, GROUP: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr, SINK: tl.constexpr,
    LOCAL: tl.constexpr, LEAST: tl.constexpr, AT_ONCE: tl.constexpr, FACTORS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Samples the blocks of one tile of one query head."""
    tile, query_head = tl.program_id(0), tl.program_id(1)
    tiles = tl.num_programs(0)
    first = m - n + tile * BLOCK
    end = (tl.minimum(first + BLOCK, m) - 1) // BLOCK + 1  # blocks that the tile's last query sees, at least in part
    free_end = tl.maximum(first // BLOCK - LOCAL + 1, SINK)
    if (tile + 1) * BLOCK > n - whole:
        free_end = SINK + 0 * free_end
    head, member = query_head // GROUP, query_head % GROUP
    rows = (head * parts + tile // TOGETHER) * ROWS + (tile % TOGETHER * GROUP + member) * SAMPLED
    sample, within = tl.arange(0, SAMPLED), tl.arange(0, AT_ONCE)
    stride = tl.full([], ROWS, tl.int64) * heads * parts
    peak = tl.load(attended + (query_head * tiles + tile) * SAMPLED + sample)
    total = tl.full([SAMPLED], 1.0, tl.float32)
    for start in range(SINK, free_end, AT_ONCE):
        block = start + within
        score = tl.load(
            scores + block[:, None] * stride + rows + sample[None, :], mask=(block < free_end)[:, None],
            other=float("-inf"),
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(score, 0))
        total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(score - higher[None, :]), 0)
        peak = higher
    norm = peak + tl.log2(total)
    needed = tl.minimum(LEAST, tl.maximum(free_end - SINK, 0)).to(tl.float32) - 1e-3
    least, step = tl.zeros([], tl.float32), tl.full([], FACTORS / 4, tl.float32)  # log2 of the factor
    for _ in range(HALVINGS // 2):  # two halvings per pass over the scores
        first_factor, factor_ratio = tl.exp2(least + step), tl.exp2(step)
        varies_1 = tl.zeros([AT_ONCE, SAMPLED], tl.float32)  # summed over threads at the end
        drawn_1 = tl.zeros([AT_ONCE], tl.float32)
        varies_2, drawn_2, varies_3, drawn_3 = varies_1, drawn_1, varies_1, drawn_1
        for start in range(SINK, free_end, AT_ONCE):
            block = start + within
            score = tl.load(
                scores + block[:, None] * stride + rows + sample[None, :], mask=(block < free_end)[:, None],
                other=float("-inf"),
            )  # fmt: skip
            share = tl.exp2(score - norm[None, :])
            expected, squared = tl.max(share, 1) * first_factor, share * share
            varies_1, drawn_1 = _add_block(varies_1, drawn_1, squared, expected)
            expected *= factor_ratio
            varies_2, drawn_2 = _add_block(varies_2, drawn_2, squared, expected)
            expected *= factor_ratio
            varies_3, drawn_3 = _add_block(varies_3, drawn_3, squared, expected)
        quarters = _too_small(varies_1, drawn_1, variance, needed) + _too_small(varies_2, drawn_2, variance, needed)
        least += step * (quarters + _too_small(varies_3, drawn_3, variance, needed))
        step /= 4
    most = least + step * 4  # log2 of the factor
    hashed = seed.to(tl.uint32) * 0x9E3779B1 + query_head.to(tl.uint32) * 0x85EBCA77 + first.to(tl.uint32) * 0xC2B2AE3D
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    passed = (hashed ^ (hashed >> 16)).to(tl.int64)  # in units of 2^-32, so that sums are exact
    place = (query_head.to(tl.int64) * tiles + tile) * blocks
    count = 0
    for start in range(0, end, AT_ONCE):
        block = start + within
        free = (block >= SINK) & (block < free_end)
        score = tl.load(
            scores + block[:, None] * stride + rows + sample[None, :], mask=free[:, None], other=float("-inf")
        )
        largest = tl.max(tl.exp2(score - norm[None, :]), 1)
        probability = tl.where(free, tl.minimum(largest * tl.exp2(most), 1.0), (block < end).to(tl.float32))
        part = tl.where(probability < 1, probability * 4294967296.0, 0.0).to(tl.int64)
        sums = passed + tl.cumsum(part, 0)
        listed = ((probability >= 1) | ((sums >> 32) != ((sums - part) >> 32))).to(tl.int32)
        at = place + count + tl.cumsum(listed, 0) - listed
        tl.store(indices + at, block, mask=listed != 0)
        tl.store(weights + at, 1 / tl.maximum(probability, 1e-30), mask=listed != 0)
        count += tl.sum(listed)
        passed += tl.sum(part)
    tl.store(counts + query_head * tiles + tile, count)
