"""Weighted sums of experts' rows in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


def sum_experts(out: Tensor, row: Tensor, weights: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Same as the reference, but only the sum is rounded."""
    out, row, weights = out.contiguous(), row.contiguous(), weights.contiguous()
    (tokens, k), size = row.shape, out.shape[1]
    summed = torch.empty(tokens, size, dtype=out.dtype, device=out.device)
    if tokens:
        last = None if offsets is None else offsets[-1:]
        _sum[(tokens, triton.cdiv(size, BLOCK))](
            out, row, weights, last, summed, SIZE=size, K=k, PARTLY=offsets is not None, BLOCK=BLOCK, num_warps=4
        )
    return summed


@triton.jit(do_not_specialize_on_alignment=["last"])
def _sum(
    out, row, weights, last, summed, SIZE: tl.constexpr, K: tl.constexpr, PARTLY: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(row + token * K + j).to(tl.int64)
        size = SIZE
        if PARTLY:
            size = tl.where(place < tl.load(last), SIZE, 0)
        x = tl.load(out + place * SIZE + column, mask=column < size, other=0.0).to(tl.float32)
        total += x * tl.load(weights + token * K + j)
    tl.store(summed + token * SIZE + column, total.to(summed.dtype.element_ty), mask=column < SIZE)
