"""Scores of chunks, and outliers, in Triton.

One kernel scores each chunk by its landmark, or by the smallest and the largest entry of its keys per dimension. It
reads each of these vectors once. Another kernel finds outliers. It reads the keys once and makes no float32 copies of
them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.triton_sizes import TOKENS, dot_size

TILE = 128
"""Number of chunks that a program scores at a time."""

BITS_SCALE = 2.0**8
"""Ratio of a float8_e4m3fn number to the float16 number with the same upper bits: their exponent biases are 7 and 15.
GPUs below compute capability 8.9 have no instruction that converts float8. There, the kernel shifts the bits to their
places in a float16 number, which takes longer."""

PROGRAMS = 4096
"""A program takes several tiles only if there would otherwise be more programs than this."""


def chunk_mean_scores(
    q: Tensor, landmarks: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same as the reference, with products summed in float32. T programs share the chunks of a row and kv head, so the
    log-sum-exps have an axis of T, one entry per program.

    Landmarks in float8_e4m3fn and bfloat16 queries are multiplied in float16, so queries must not exceed 65504.
    """
    return score_chunks(q, landmarks.unsqueeze(2), excluded, pages, num_chunks, scale)


def score_chunks(
    q: Tensor, vectors: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes ``chunk_mean_scores`` or ``min_max_scores``. ``vectors`` [N, H, 1, C, d] are the chunks' mean keys. In
    ``vectors`` [N, H, 2, C, d], plane 0 holds the smallest entry per dimension, and plane 1 the largest.

    All views over pages are contiguous but for their first axis.
    """
    factor = q.shape[-1] ** -0.5
    converts = scale is not None and _converts(q.device)
    if scale is not None:
        vectors, factor = vectors.view(torch.uint8), factor if converts else factor * BITS_SCALE
    batch, query_heads, dim = q.shape
    heads, planes, chunks = vectors.shape[1:4]
    group, total = query_heads // heads, pages.shape[1] * chunks
    tiles = triton.cdiv(total, TILE)
    tiles_each = max(1, tiles * batch * heads // PROGRAMS)
    programs = triton.cdiv(tiles, tiles_each)
    logits = torch.empty(batch, heads, group, total, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, group, programs, dtype=torch.float32, device=q.device)
    _score[(programs, heads, batch)](
        q.contiguous(),
        vectors,
        vectors.stride(0),
        excluded,
        excluded.stride(0),
        pages,
        pages.stride(0),
        num_chunks,
        scale,
        0 if scale is None else scale.stride(0),
        logits,
        lse,
        factor,
        total,
        tiles_each,
        BOUNDS=planes == 2,
        CONVERTS=converts,
        HEADS=heads,
        GROUP=group,
        GROUP_BLOCK=dot_size(group),
        CHUNKS=chunks,
        DIM=dim,
        DIM_BLOCK=dot_size(dim),
        TILE=TILE,
        num_warps=4,
        num_stages=3 if scale is None else 2,
    )
    return logits, lse


@cache
def _converts(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit(do_not_specialize_on_alignment=["pages"])
def _score(
    q,
    vectors,
    vectors_stride,
    excluded,
    excluded_stride,
    pages,
    pages_stride,
    num_chunks,
    scale,
    scale_stride,
    logits,
    lse,
    factor,
    total,
    tiles_each,
    BOUNDS: tl.constexpr,
    CONVERTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    program, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query, dim = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    there = (query < GROUP)[:, None] & (dim < DIM)[None, :]
    at = (row * HEADS + head) * GROUP + query
    queries = tl.load(q + at[:, None] * DIM + dim[None, :], mask=there, other=0)
    if scale is not None and queries.dtype == tl.bfloat16:
        queries = queries.to(tl.float16)
    if BOUNDS:
        rising, falling = tl.maximum(queries, 0).to(queries.dtype), tl.minimum(queries, 0).to(queries.dtype)
    count = tl.load(num_chunks + row)
    peak = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_BLOCK], tl.float32)
    for tile in range(program * tiles_each, (program + 1) * tiles_each):
        chunk = tile * TILE + tl.arange(0, TILE)
        valid = chunk < count
        page_id = tl.load(pages + row * pages_stride + chunk // CHUNKS, mask=valid, other=0)
        bits = tl.load(excluded + page_id * excluded_stride + head * CHUNKS + chunk % CHUNKS, mask=valid, other=1)
        planes: tl.constexpr = 2 if BOUNDS else 1
        first = page_id * vectors_stride + (head * planes * CHUNKS + chunk % CHUNKS) * DIM
        readable = valid[:, None] & (dim < DIM)[None, :]
        keys = tl.load(vectors + first[:, None] + dim[None, :], mask=readable, other=0)
        if scale is not None:
            if CONVERTS:
                keys = keys.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(queries.dtype)
            else:
                code = keys.to(tl.int16)
                keys = (((code & 128) << 8) | ((code & 127) << 7)).to(tl.float16, bitcast=True).to(queries.dtype)
        if BOUNDS:
            above = tl.load(vectors + first[:, None] + (CHUNKS * DIM + dim)[None, :], mask=readable, other=0)
            scores = tl.dot(falling, keys.trans(), input_precision="ieee")
            scores = tl.dot(rising, above.trans(), scores, input_precision="ieee")
        else:
            scores = tl.dot(queries, keys.trans(), input_precision="ieee")
        scores *= factor
        if scale is not None:
            scores *= tl.load(scale + page_id * scale_stride + head, mask=valid, other=0)[None, :]
        scores = tl.where((bits == 0)[None, :], scores, float("-inf"))
        tl.store(
            logits + at[:, None] * total + chunk[None, :],
            scores,
            mask=(query < GROUP)[:, None] & (chunk < total)[None, :],
        )
        top = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(top == float("-inf"), 0, top)  # -inf minus -inf would be NaN
        weight = weight * tl.exp(peak - safe) + tl.sum(tl.exp(scores - safe[:, None]), 1)
        peak = top
    tl.store(lse + at * tl.num_programs(0) + program, peak + tl.log(weight), mask=query < GROUP)


def min_max_scores(
    q: Tensor, bounds: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference, with products summed in float32. T programs share the chunks of a row and kv head, so the
    log-sum-exps have an axis of T, one entry per program."""
    return score_chunks(q, bounds, excluded, pages, num_chunks)


def find_outliers(rope_keys: Tensor, chunk: int, count: int, sink: int = 1) -> Tensor:
    """Same as the reference. ``chunk`` is a power of two up to 64. The last dimension of ``rope_keys`` is
    contiguous."""
    tokens, heads, dim = rope_keys.shape
    if not count:
        return torch.empty(heads, 0, dtype=torch.int64, device=rope_keys.device)
    worst = torch.empty(heads, tokens // chunk, dtype=torch.float32, device=rope_keys.device)
    _worst_cosine[(triton.cdiv(tokens, 64), heads)](
        rope_keys, worst, rope_keys.stride(0), rope_keys.stride(1), tokens // chunk, CHUNK=chunk, DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
    )  # fmt: skip
    return worst[:, sink:].topk(count, largest=False).indices + sink


@triton.jit(do_not_specialize=["chunks"])
def _worst_cosine(
    rope_keys, worst, token_stride, head_stride, chunks, CHUNK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):  # fmt: skip
    """Computes the smallest cosine of each chunk's keys with their mean, for a page of tokens of one head."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHUNKS: tl.constexpr = TOKENS // CHUNK
    chunk = block * CHUNKS + tl.arange(0, CHUNKS)
    within = tl.arange(0, TOKENS)
    token = block * TOKENS + within
    dim = tl.arange(0, DIM_BLOCK)
    lives = (token < chunks * CHUNK)[:, None] & (dim < DIM)[None, :]
    rows = tl.load(rope_keys + token[:, None] * token_stride + head * head_stride + dim[None, :], mask=lives, other=0.0)
    # A key's product with the mean is the mean of its products with all keys, and tensor cores compute these products.
    products = tl.dot(rows, tl.trans(rows), input_precision="ieee")
    same = (within // CHUNK)[:, None] == (within // CHUNK)[None, :]
    with_sum = tl.sum(tl.where(same, products, 0.0), 1)
    square = tl.sum(tl.where(within[:, None] == within[None, :], products, 0.0), 1)
    with_sum = tl.reshape(with_sum, (CHUNKS, CHUNK))
    square_of_sum = tl.maximum(tl.sum(with_sum, 1), 0.0)
    norms = tl.sqrt(tl.reshape(square, (CHUNKS, CHUNK))) * tl.sqrt(square_of_sum)[:, None]
    cosine = with_sum / tl.maximum(norms, CHUNK * 1e-12)
    tl.store(worst + head * chunks + chunk, tl.min(cosine, 1), mask=chunk < chunks)
