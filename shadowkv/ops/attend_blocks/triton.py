"""Attention over selected blocks in one Triton kernel. A program computes one tile of 128 queries of one head."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.select_blocks.reference import BLOCK


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case: a tile of queries and blocks of keys and values must fit in shared memory."""
    row = triton.next_power_of_2(case.head_dim) * case.dtype.itemsize
    blocks = 5 if case.capability is not None and case.capability >= (9, 0) else 3
    need = blocks * BLOCK * row
    return unless(
        need <= case.block_memory, f"a thread block has {case.block_memory} bytes of shared memory, not {need}"
    )


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference. Sums are in float32."""
    n, query_heads, dim = q.shape
    m, heads = k.shape[:2]
    out, lse = torch.empty_like(q), torch.empty(n, query_heads, dtype=torch.float32, device=q.device)
    tiles, blocks = indices.shape[1:]
    _attend[(tiles, query_heads)](
        q, k, v, out, lse, indices, counts, weights, n, m, blocks, dim**-0.5 * math.log2(math.e),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
        DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), GROUP=query_heads // heads, BLOCK=BLOCK,
        EXACT=q.dtype == torch.float32, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["n", "m", "blocks"])
def _attend(
    q, k, v, out, lse, indices, counts, weights, n, m, blocks, scale, q_token, q_head, k_token, k_head, v_token, v_head,
    out_token, out_head, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    tile, query_head = tl.program_id(0), tl.program_id(1)
    head = query_head // GROUP
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    within, dim = tl.arange(0, BLOCK), tl.arange(0, DIM_BLOCK)
    token = tile * BLOCK + within
    lives = (token < n)[:, None] & (dim < DIM)[None, :]
    place = token.to(tl.int64)[:, None]
    queries = tl.load(q + place * q_token + query_head * q_head + dim[None, :], mask=lives, other=0.0)
    position = m - n + token
    place_in_list = query_head * tl.num_programs(0) + tile
    listed = indices + place_in_list.to(tl.int64) * blocks
    weighted = weights + place_in_list.to(tl.int64) * blocks
    count = tl.load(counts + place_in_list)
    first = m - n + tile * BLOCK
    masked = (tl.minimum(first + BLOCK, m) - 1) // BLOCK - first // BLOCK + 1  # blocks that not all queries see in full
    keys_of, values_of = k + head * k_head + dim[None, :], v + head * v_head + dim[None, :]
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, DIM_BLOCK], tl.float32)
    for i in range(0, count - masked):
        rows = (tl.load(listed + i).to(tl.int64) * BLOCK + within)[:, None]
        if DIM == DIM_BLOCK:
            keys = tl.load(keys_of + rows * k_token)
            values = tl.load(values_of + rows * v_token)
        else:
            keys = tl.load(keys_of + rows * k_token, mask=(dim < DIM)[None, :], other=0.0)
            values = tl.load(values_of + rows * v_token, mask=(dim < DIM)[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=precision)
        counts_as = tl.log2(tl.load(weighted + i))
        higher = tl.maximum(peak, tl.max(scores, 1) * scale + counts_as)
        parts = tl.exp2(scores * scale + (counts_as - higher)[:, None])
        shrunk = tl.exp2(peak - higher)
        total = total * shrunk + tl.sum(parts, 1)
        sums = tl.dot(parts.to(values.dtype), values, sums * shrunk[:, None], input_precision=precision)
        peak = higher
    for i in range(count - masked, count):
        key = tl.load(listed + i) * BLOCK + within
        rows = key.to(tl.int64)[:, None]
        there = (key < m)[:, None] & (dim < DIM)[None, :]
        keys = tl.load(keys_of + rows * k_token, mask=there, other=0.0)
        values = tl.load(values_of + rows * v_token, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        parts = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(peak - base)
        total = total * shrunk + tl.sum(parts, 1)
        sums = tl.dot(parts.to(values.dtype), values, sums * shrunk[:, None], input_precision=precision)
        peak = higher
    attended = (sums / total[:, None]).to(out.dtype.element_ty)
    logarithm = (peak + tl.log2(total)) * 0.6931471805599453  # ln(2)
    tl.store(lse + token.to(tl.int64) * tl.num_programs(1) + query_head, logarithm, mask=token < n)
    tl.store(out + place * out_token + query_head * out_head + dim[None, :], attended, mask=lives)
