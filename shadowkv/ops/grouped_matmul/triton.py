"""Products of sorted rows with experts' matrices in one Triton kernel. It serves GPUs for which PyTorch has no grouped
kernel. On other GPUs, ``cuda.py`` calls this kernel for few rows. The kernel reads ``offsets`` on the device, so the
host does not wait. It reads only the matrices of experts that have rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.case import Case, unless

DTYPES = (torch.bfloat16, torch.float16)

TILES = ((16, 64, 128, 4, 4), (32, 128, 128, 3, 8), (64, 128, 64, 4, 4), (128, 128, 64, 3, 8))
"""For each tile: rows, columns of the result, columns of x per iteration, pipeline stages and warps. The kernel uses
the first tile that has at least twice as many rows as an expert has on average, or else the last tile. On an H200, with
the experts of Qwen3-30B-A3B, each tile was the fastest of about fifteen, or within 3 % of the fastest."""


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve a case."""
    return unless(case.dtype in DTYPES, f"it multiplies torch.bfloat16 and torch.float16, not {case.dtype}")


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, total_experts: int | None = None) -> Tensor:
    """Same as the reference."""
    return multiply_in_tiles(x, weight, offsets, total_experts)


def multiply_in_tiles(x: Tensor, weight: Tensor, offsets: Tensor, total_experts: int | None = None) -> Tensor:
    """As ``grouped_matmul``, for ``x`` [S, K] and ``weight`` [E, N, K] in a 16-bit dtype. Returns [S, N]. Sums are in
    float32."""
    (rows, columns), (experts, size, _) = x.shape, weight.shape
    out = x.new_empty(rows, size)
    if rows:
        each = rows / (total_experts or experts)
        tile = next((tile for tile in TILES if each <= tile[0] // 2), TILES[-1])
        high, wide, deep, stages, warps = tile
        blocks = min(rows, rows // high + min(rows, experts))  # upper bound on the tiles of rows
        _multiply[(triton.cdiv(size, wide), blocks)](
            x, weight, offsets, out, experts, N=size, K=columns, EXPERTS=triton.next_power_of_2(experts),
            HIGH=high, WIDE=wide, DEEP=deep, num_stages=stages, num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["offsets"])
def _multiply(
    x, weight, offsets, out, experts, N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Computes a tile of one expert's rows. A tile has rows of only one expert."""
    block, number = tl.program_id(1), tl.arange(0, EXPERTS)
    begins = tl.load(offsets + number, mask=number < experts, other=0)
    ends = tl.load(offsets + number + 1, mask=number < experts, other=0)
    tiles = (ends - begins + HIGH - 1) // HIGH
    up_to = tl.cumsum(tiles, 0)
    before = up_to - tiles
    if block < tl.sum(tiles, 0):
        mine = (before <= block) & (block < up_to)
        expert = tl.sum(tl.where(mine, number, 0), 0).to(tl.int64)
        first = tl.sum(tl.where(mine, begins + (block - before) * HIGH, 0), 0)
        end = tl.sum(tl.where(mine, ends, 0), 0)
        row = first + tl.arange(0, HIGH)
        column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
        k = tl.arange(0, DEEP)
        theirs = x + row.to(tl.int64)[:, None] * K + k[None, :]
        weights = weight + expert * N * K + column[None, :] * K + k[:, None]
        total = tl.zeros((HIGH, WIDE), tl.float32)
        for start in range(0, K, DEEP):
            inside = start + k < K
            a = tl.load(theirs + start, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            b = tl.load(weights + start, mask=(column < N)[None, :] & inside[:, None], other=0.0)
            total = tl.dot(a, b, total)
        place = out + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < N)[None, :])
