"""Stratified draws of chunks in one Triton kernel, one program a row and head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 512
"""Runs that a program draws from at a time."""


def draw_chunks(
    selected: Tensor,
    excluded: Tensor,
    pages: Tensor,
    num_chunks: Tensor,
    found: Tensor,
    drawn: Tensor,
    seeds: Tensor,
    layer: int,
) -> None:
    """As the reference; ``selected`` is contiguous and found chunks are in ascending order."""
    batch, heads, k = selected.shape
    _draw[(heads, batch)](
        selected,
        excluded,
        excluded.stride(0),
        pages,
        pages.stride(0),
        num_chunks,
        found,
        drawn,
        seeds,
        layer * heads,
        k,
        HEADS=heads,
        CHUNKS=excluded.shape[-1],
        TILE=min(TILE, triton.next_power_of_2(k)),
        STEPS=k.bit_length(),
        num_warps=4,
    )


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _draw(
    selected,
    excluded,
    excluded_stride,
    pages,
    pages_stride,
    num_chunks,
    found,
    drawn,
    seeds,
    first_head,
    k,
    HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    runs, before = tl.load(drawn + row).to(tl.int32), tl.load(found + row).to(tl.int32)
    out = selected + (row * HEADS + head) * k
    last = tl.load(out + tl.maximum(before, 1) - 1)
    if (runs == 0) | ((before > 0) & (last < 0)):
        return
    total = tl.load(num_chunks + row)
    seed = tl.load(seeds + row).to(tl.uint32) * 0x9E3779B1 + (first_head + head).to(tl.uint32)
    state, count = _mix(seed), 0
    for base in range(0, runs, TILE):
        number = base + tl.arange(0, TILE)
        start = number.to(tl.int64) * total // runs
        size = (number.to(tl.int64) + 1) * total // runs - start
        draw = _mix(state + number.to(tl.uint32) * 0x85EBCA77)
        chunk = start + ((draw.to(tl.int64) * size) >> 32)
        good = number < runs
        name = tl.load(pages + row * pages_stride + chunk // CHUNKS, mask=good, other=0)
        bit = tl.load(excluded + name * excluded_stride + head * CHUNKS + chunk % CHUNKS, mask=good, other=1)
        # The first found chunk that is not below: found ones ascend, -1s are beyond all.
        low, high = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32) + before
        for _ in range(STEPS):
            middle = (low + high) // 2
            there = tl.load(out + middle, mask=good & (low < high), other=-1)
            below = (there >= 0) & (there < chunk)
            low = tl.where((low < high) & below, middle + 1, low)
            high = tl.where((low < high) & ~below & (middle < high), middle, high)
        there = tl.load(out + low, mask=good & (low < before), other=-1)
        good = good & (bit == 0) & (there != chunk)
        place = count + tl.cumsum(good.to(tl.int32), 0) - 1
        tl.store(out + before + place, chunk, mask=good)
        count += tl.sum(good.to(tl.int32), 0)
    for base in range(before + count, k, TILE):
        column = base + tl.arange(0, TILE)
        tl.store(out + column, tl.full([TILE], -1, tl.int64), mask=column < k)
