"""Selection of blocks in four Triton kernels: queries are sampled, coded, scored against keys, and blocks chosen."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.select_blocks.reference import BLOCK, LOCAL_BLOCKS, SAMPLED, SINK_BLOCKS, WIDTH, KeyBlocks
from shadowkv.ops.select_blocks.triton_steps import in_steps, step_of

SPAN = 32
"""Blocks of keys that a program scores."""

AT_ONCE = 512
"""Blocks of keys that are chosen from together."""


def supports(case: Case) -> list[str]:
    """Why the kernels cannot serve a case: in shared memory are queries to be sampled and blocks of codes."""
    row = triton.next_power_of_2(case.head_dim) * case.dtype.itemsize
    blocks = 4 if case.capability is not None and case.capability >= (9, 0) else 3
    need = blocks * BLOCK * row + 2048
    return unless(
        need <= case.block_memory, f"a thread block has {case.block_memory} bytes of shared memory, not {need}"
    )


def select_blocks(
    q: Tensor, keys: KeyBlocks, m: int, share: float, most: float, whole: int = 0
) -> tuple[Tensor, Tensor]:
    """As the reference; sums are in float32, products exact."""
    asked = code_queries(q, sample_queries(q), keys.codes.shape[1])
    scores = score_buffer(asked, m)
    score_blocks(asked, keys, len(q), m, scores)
    return choose_blocks(scores, q, m, share, most, whole)


class Asked(NamedTuple):
    """Sampled queries in 127ths of their largest entry, as they are scored together.

    Attributes:
        codes: int8 [H, parts, rows, w]. A part's rows are the sampled queries of a kv head's query heads, of
            ``tiles_together``; there may be more of them, which are zero.
        steps: float32 [H, parts, rows], what a code of 1 stands for.
        dim: of a query.
        group: query heads of a kv head.
    """

    codes: Tensor
    steps: Tensor
    dim: int
    group: int


def tiles_together(group: int) -> int:
    """Tiles whose sampled queries are scored together, those of all query heads of a kv head."""
    return max(1, 128 // (group * SAMPLED))


def code_queries(q: Tensor, sampled: Tensor, heads: int) -> Asked:
    """Those of queries [n, H_q, d] that are ``sampled``, rows int32 [H_q, tiles, ``SAMPLED``], of so many kv heads."""
    group, dim, tiles = q.shape[1] // heads, q.shape[2], sampled.shape[1]
    together = tiles_together(group)
    rows, parts = max(16, triton.next_power_of_2(together * group * SAMPLED)), triton.cdiv(tiles, together)
    codes = torch.empty(heads, parts, rows, triton.cdiv(dim, WIDTH) * WIDTH, dtype=torch.int8, device=q.device)
    steps = torch.empty(codes.shape[:3], dtype=torch.float32, device=q.device)
    _code_queries[(parts, heads, rows // 16)](
        q, sampled, codes, steps, tiles, *q.stride()[:2], DIM=dim, WIDTH=codes.shape[3], GROUP=group,
        TOGETHER=together, ROWS=rows, SAMPLED=SAMPLED,
    )  # fmt: skip
    return Asked(codes, steps, dim, group)


def score_buffer(asked: Asked, m: int) -> Tensor:
    """float32 [blocks, H, parts, rows] for ``score_blocks``, of m keys."""
    heads, parts, rows, _ = asked.codes.shape
    shape = triton.cdiv(m, BLOCK), heads, parts, rows
    return torch.empty(shape, dtype=torch.float32, device=asked.codes.device)


def score_blocks(asked: Asked, keys: KeyBlocks, n: int, m: int, scores: Tensor) -> None:
    """Writes log2 of the sums of exponentials of sampled queries over all blocks that a tile may choose, and some
    others.

    Args:
        n, m: numbers of queries and of keys.
        scores: float32 [blocks, H, parts, rows], of ``score_buffer``; written.
    """
    blocks, heads, parts, rows = scores.shape
    codes, tiles = keys.codes, triton.cdiv(n, BLOCK)
    _score[(parts, heads, triton.cdiv(blocks, SPAN))](
        *asked[:2], codes, keys.steps, scores, n, m, tiles, asked.dim**-0.5 * math.log2(math.e), *codes.stride()[:2],
        DIM=asked.dim, DIM_BLOCK=max(32, triton.next_power_of_2(asked.dim)), WIDTH=asked.codes.shape[3],
        GROUP=asked.group, TOGETHER=tiles_together(asked.group), ROWS=rows, SPAN=SPAN, BLOCK=BLOCK, SAMPLED=SAMPLED,
        LOCAL=LOCAL_BLOCKS, num_warps=8,
    )  # fmt: skip


def choose_blocks(scores: Tensor, q: Tensor, m: int, share: float, most: float, whole: int) -> tuple[Tensor, Tensor]:
    """What ``select_blocks`` returns, by the scores [blocks, H, parts, rows] that ``score_blocks`` has written; all
    other arguments as ``select_blocks`` gets them."""
    (n, query_heads, _), (blocks, heads, parts, rows) = q.shape, scores.shape
    group, tiles = query_heads // heads, triton.cdiv(n, BLOCK)
    indices = torch.empty(query_heads, tiles, blocks, dtype=torch.int32, device=q.device)
    counts = torch.empty(query_heads, tiles, dtype=torch.int32, device=q.device)
    _choose[(tiles, query_heads)](
        scores, indices, counts, n, m, whole, heads, parts, blocks, math.log2(share), most, GROUP=group,
        TOGETHER=tiles_together(group), ROWS=rows, BLOCK=BLOCK, SAMPLED=SAMPLED, SINK=SINK_BLOCKS, LOCAL=LOCAL_BLOCKS,
        AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return indices, counts


def sample_queries(q: Tensor) -> Tensor:
    """As the reference, but for queries that are nearly as far from others; products are summed in float32."""
    n, query_heads, dim = q.shape
    tiles = triton.cdiv(n, BLOCK)
    sampled = torch.empty(query_heads, tiles, SAMPLED, dtype=torch.int32, device=q.device)
    _sample[(tiles, query_heads)](
        q, sampled, n, *q.stride()[:2], DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), BLOCK=BLOCK, SAMPLED=SAMPLED,
        EXACT=q.dtype == torch.float32, num_warps=8,
    )  # fmt: skip
    return sampled


@triton.jit(do_not_specialize=["n"])
def _sample(
    q, sampled, n, q_token, q_head, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of one tile of one head."""
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
    newest = tl.minimum(n - tile * BLOCK, BLOCK) - 1
    nearest = tl.full([BLOCK], float("inf"), tl.float32)
    out = sampled + (head * tl.num_programs(0) + tile) * SAMPLED
    for number in range(SAMPLED):
        tl.store(out + number, tile * BLOCK + newest)
        nearest = tl.minimum(nearest, tl.sum(tl.where(within[None, :] == newest, apart, 0.0), 1))
        newest = tl.argmax(tl.where(token < n, nearest, float("-inf")), 0).to(tl.int32)


@triton.jit(do_not_specialize=["tiles"])
def _code_queries(
    q, sampled, codes, steps, tiles, q_token, q_head, DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """16 rows of a part."""
    part, head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * 16 + tl.arange(0, 16)
    tile = part * TOGETHER + row // (SAMPLED * GROUP)
    member, sample = row % (SAMPLED * GROUP) // SAMPLED, row % SAMPLED
    lives = (row < TOGETHER * SAMPLED * GROUP) & (tile < tiles)
    token = tl.load(sampled + ((head * GROUP + member) * tiles + tile) * SAMPLED + sample, mask=lives, other=0)
    dim = tl.arange(0, WIDTH)[None, :]
    x = tl.load(
        q + token.to(tl.int64)[:, None] * q_token + (head * GROUP + member)[:, None] * q_head + dim,
        mask=lives[:, None] & (dim < DIM), other=0.0,
    ).to(tl.float32)  # fmt: skip
    largest, bad = tl.max(tl.abs(x), 1), tl.max((x != x).to(tl.int32), 1)
    place = (head * tl.num_programs(0) + part) * ROWS + row
    tl.store(codes + place.to(tl.int64)[:, None] * WIDTH + dim, in_steps(x, largest[:, None]))
    tl.store(steps + place, step_of(largest, bad))


@triton.jit(do_not_specialize=["n", "m", "tiles"])
def _score(
    asked, steps, codes, block_steps, scores, n, m, tiles, scale, k_token, k_head, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """log2 of the sums of exponentials of sampled queries of a few tiles, over each of a span of blocks of one head."""
    part, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    tile = part * TOGETHER + row // (SAMPLED * GROUP)
    lives = (row < TOGETHER * SAMPLED * GROUP) & (tile < tiles)
    place = (head * tl.num_programs(0) + part) * ROWS + row
    queries = tl.load(asked + place.to(tl.int64)[:, None] * WIDTH + dim[None, :], mask=(dim < DIM)[None, :], other=0)
    step = tl.load(steps + place) * scale
    last = (m - n + tl.minimum(part * TOGETHER + TOGETHER, tiles) * BLOCK - BLOCK) // BLOCK - LOCAL
    within = tl.arange(0, BLOCK)
    out = scores + ((span.to(tl.int64) * SPAN * tl.num_programs(1) + head) * tl.num_programs(0) + part) * ROWS + row
    to_next = tl.num_programs(1) * tl.num_programs(0) * ROWS
    rows = codes + head * k_head + (span * SPAN * BLOCK + within).to(tl.int64)[:, None] * k_token + dim[None, :]
    for block in range(span * SPAN, tl.minimum(span * SPAN + SPAN, last + 1)):
        if DIM == DIM_BLOCK:
            keys = tl.load(rows)
        else:
            keys = tl.load(rows, mask=(dim < DIM)[None, :], other=0)
        whole = step * tl.load(block_steps + block * tl.num_programs(1) + head)
        products = tl.dot(queries, tl.trans(keys), out_dtype=tl.int32).to(tl.float32) * whole[:, None]
        peak = tl.max(products, 1)
        total = peak + tl.log2(tl.sum(tl.exp2(products - peak[:, None]), 1))
        tl.store(out, total, mask=lives)
        rows += BLOCK * k_token
        out += to_next


@triton.jit(do_not_specialize=["n", "m", "whole", "parts", "blocks"])
def _choose(
    scores, indices, counts, n, m, whole, heads, parts, blocks, least, most, GROUP: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr, SINK: tl.constexpr,
    LOCAL: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Blocks of one tile of one query head."""
    tile, query_head = tl.program_id(0), tl.program_id(1)
    tiles = tl.num_programs(0)
    first = m - n + tile * BLOCK
    end = (tl.minimum(first + BLOCK, m) - 1) // BLOCK + 1  # blocks that its last query sees some of
    free_end = tl.maximum(first // BLOCK - LOCAL + 1, SINK)
    if (tile + 1) * BLOCK > n - whole:
        free_end = SINK + 0 * free_end
    head, member = query_head // GROUP, query_head % GROUP
    rows = (head * parts + tile // TOGETHER) * ROWS + (tile % TOGETHER * GROUP + member) * SAMPLED
    sample, within = tl.arange(0, SAMPLED), tl.arange(0, AT_ONCE)
    step = tl.full([], ROWS, tl.int64) * heads * parts
    peak = tl.full([SAMPLED], float("-inf"), tl.float32)
    total = tl.zeros([SAMPLED], tl.float32)
    for start in range(SINK, free_end, AT_ONCE):
        block = start + within
        one = tl.load(
            scores + block[:, None] * step + rows + sample[None, :], mask=(block < free_end)[:, None],
            other=float("-inf"),
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(one, 0))
        total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(one - higher[None, :]), 0)
        peak = higher
    norm = peak + tl.log2(total)
    allowed = (most * end).to(tl.int32)
    kept = allowed + 1
    least -= 1.0
    while kept > allowed:
        least += 1.0
        kept = 0
        for start in range(SINK, free_end, AT_ONCE):
            block = start + within
            one = tl.load(
                scores + block[:, None] * step + rows + sample[None, :], mask=(block < free_end)[:, None],
                other=float("-inf"),
            )  # fmt: skip
            kept += tl.sum((tl.max(one - norm[None, :], 1) >= least).to(tl.int32))
    out = indices + (query_head.to(tl.int64) * tiles + tile) * blocks
    count = 0
    for start in range(0, end, AT_ONCE):
        block = start + within
        free = (block >= SINK) & (block < free_end)
        one = tl.load(scores + block[:, None] * step + rows + sample[None, :], mask=free[:, None], other=float("-inf"))
        chosen = tl.where(free, tl.max(one - norm[None, :], 1) >= least, block < end)
        ones = chosen.to(tl.int32)
        tl.store(out + count + tl.cumsum(ones, 0) - ones, block, mask=chosen)
        count += tl.sum(ones)
    tl.store(counts + query_head * tiles + tile, count)
