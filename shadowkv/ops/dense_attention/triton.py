"""Dense attention in one Triton kernel, for packed sequences, windows and sinks, in any dtype (FlashAttention-2,
arXiv:2307.08691)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.dense_attention.forms import Packed
from shadowkv.ops.triton_sizes import LARGEST_HEAD, dot_size

WIDE_BYTES = 131072
"""Bytes of shared memory of a thread block for heads of 512 dimensions, as compiled for compute capability 9.0."""


def supports(case: Case) -> list[str]:
    """Why this kernel cannot serve a case."""
    if case.head_dim <= LARGEST_HEAD:
        return []
    memory = f"a block needs {WIDE_BYTES} bytes of shared memory, and can have {case.block_memory}"
    return [
        *unless(case.head_dim <= 512, f"head dim {case.head_dim} is above 512"),
        *unless(case.dtype != torch.float32, f"{case.dtype} is not of 16 bits"),
        *unless(case.block_memory >= WIDE_BYTES, memory),
    ]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Same as the reference, for head dims up to 512. Can be captured in a CUDA graph."""
    return _launch(q, k, v, None, None, None)


def packed(q: Tensor, k: Tensor, v: Tensor, pack: Packed) -> Tensor:
    """Same as the reference, for head dims up to 512. Can be captured in a CUDA graph."""
    return _launch(q, k, v, None, None, pack)


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None, pack: Packed | None) -> Tensor:
    """Same as the reference, for head dims up to 512. Keys that are before the windows of all queries of a tile are not
    read. Can be captured in a CUDA graph."""
    return _launch(q, k, v, window, sinks, pack)


def _launch(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None, pack: Packed | None) -> Tensor:
    """As ``windowed``, or if ``window`` is None, as ``packed``, or as ``causal`` if ``pack`` is None, too."""
    cu_seqlens, cu_seqlens_k = (None, None) if pack is None else (pack.cu_seqlens, pack.cu_seqlens_k)
    (tokens, heads, dim), count = q.shape, 1 if cu_seqlens is None else len(cu_seqlens) - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    block = dot_size(dim)
    narrow = block * q.element_size() <= 256
    wide = block > LARGEST_HEAD
    rows, keys = (128, 64) if narrow else (64, 16) if wide else (64, 32)
    # Each sequence starts with a new tile, even if the previous sequence's last tile is not full.
    _attend[(tokens // rows + count, heads)](
        q, k, v, cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, sinks, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        count, tokens, len(k) - tokens, window or 0, 1 / (math.sqrt(dim) * math.log(2)),
        GROUP=heads // k.shape[1], HEADS=heads, DIM=dim, DIM_BLOCK=block, PACKED=cu_seqlens is not None,
        WINDOWED=window is not None, SINKS=sinks is not None,
        ROWS=rows, KEYS=keys, num_warps=8 if (narrow and block >= 128) or wide else 4,
        num_stages=2 if narrow or wide else 1,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["count", "tokens", "before", "window"],
    do_not_specialize_on_alignment=["cu_seqlens", "cu_seqlens_k", "sinks"],
)
def _attend(
    q, k, v, cu_seqlens, cu_seqlens_k, sinks, out, q_row, q_head, k_row, k_head, v_row, v_head, count, tokens, before,
    window, scale, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PACKED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes one tile of the queries of one sequence and head. ``before`` is the number of keys before a sequence's
    first query. If sequences are packed, the kernel computes ``before`` itself."""
    tile, head = tl.program_id(0), tl.program_id(1)
    if PACKED:
        # The tiles of sequence i start at cu_seqlens[i] // ROWS + i. The sequence has as many tiles as it needs, or one
        # more.
        sequence = 0
        last = count - 1
        while sequence < last:
            middle = (sequence + last + 1) // 2
            begun = tl.load(cu_seqlens + middle) // ROWS + middle <= tile
            sequence = tl.where(begun, middle, sequence)
            last = tl.where(begun, last, middle - 1)
        start = tl.load(cu_seqlens + sequence)
        length = tl.load(cu_seqlens + sequence + 1) - start
        first = (tile - start // ROWS - sequence) * ROWS
        key_start = tl.load(cu_seqlens_k + sequence)
        before = tl.load(cu_seqlens_k + sequence + 1) - key_start - length
    else:
        start = tl.full((), 0, tl.int32)
        key_start = start
        length = tokens
        first = tile * ROWS

    row, dim = first + tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    base, lives = start.to(tl.int64), (row < length)[:, None] & (dim < DIM)[None, :]
    x = tl.load(
        q + (base + row)[:, None] * q_row + head * q_head + dim[None, :], mask=lives, other=0.0
    )  # [ROWS, DIM_BLOCK]
    keys = k + key_start.to(tl.int64) * k_row + head // GROUP * k_head
    values = v + key_start.to(tl.int64) * v_row + head // GROUP * v_head
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
    position, from_here = before + row, before + first  # in the sequence's keys
    end = tl.where(first < length, tl.minimum(from_here + ROWS, before + length), 0)  # 0 for a surplus tile
    if WINDOWED:
        most, total, sums = _add(
            x, keys, values, k_row, v_row, position, tl.maximum(from_here - window + 1, 0), end, end, window, scale,
            most, total, sums, True, True, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
    else:
        seen_by_all = tl.minimum(from_here // KEYS * KEYS, end)  # end of the whole blocks that all queries see
        most, total, sums = _add(
            x, keys, values, k_row, v_row, position, 0, seen_by_all, end, window, scale,
            most, total, sums, False, False, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
        most, total, sums = _add(
            x, keys, values, k_row, v_row, position, seen_by_all, end, end, window, scale,
            most, total, sums, True, False, DIM, DIM_BLOCK, KEYS,
        )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634  # log2(e)
        highest = tl.maximum(most, sink)
        faded = tl.exp2(most - highest)
        total = total * faded + tl.exp2(sink - highest)
        sums = sums * faded[:, None]
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + ((base + row)[:, None] * HEADS + head) * DIM + dim[None, :], result, mask=lives)


@triton.jit
def _add(
    x, keys, values, k_row, v_row, position, start, stop, end, window, scale, most, total, sums,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds the keys from ``start`` to ``stop`` to a base-2 online softmax. Keys from ``end`` on belong to another
    sequence."""
    dim = tl.arange(0, DIM_BLOCK)
    for first in range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        there = (dim < DIM)[None, :] & (key < end)[:, None]
        place = key.to(tl.int64)[:, None]
        some = tl.load(keys + place * k_row + dim[None, :], mask=there, other=0.0)
        scores = tl.dot(x, tl.trans(some), input_precision="ieee") * scale
        if CAUSAL:
            seen = (key[None, :] <= position[:, None]) & (key < end)[None, :]
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        peak = highest
        if WINDOWED:  # some rows see none of the first keys
            peak = tl.where(highest > float("-inf"), highest, 0.0)
        weights = tl.exp2(scores - peak[:, None])
        faded = tl.exp2(most - peak)
        total = total * faded + tl.sum(weights, 1)
        some = tl.load(values + place * v_row + dim[None, :], mask=there, other=0.0)
        sums = sums * faded[:, None] + tl.dot(weights.to(some.dtype), some, input_precision="ieee")
        most = highest
    return most, total, sums
