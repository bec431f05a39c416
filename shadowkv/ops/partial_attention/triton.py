"""Learned sinks, and the merge of partial attentions, two at a time, in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Same as the reference."""
    out, lse = out.contiguous(), lse.contiguous()
    (heads, dim), weighed, joined = out.shape[1:], torch.empty_like(out), torch.empty_like(lse)
    if lse.numel():
        _add_sinks[(lse.numel(),)](
            *(out, lse, sinks, weighed, joined), HEADS=heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1
        )
    return weighed, joined


@triton.jit
def _add_sinks(out, lse, sinks, weighed, joined, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    before, sink = tl.load(lse + row), tl.load(sinks + row % HEADS)
    peak = tl.maximum(before, sink)
    weight = tl.exp(before - peak)
    total = weight + tl.exp(sink - peak)
    x = tl.load(out + row * DIM + dim, mask=dim < DIM).to(tl.float32) * (weight / total)
    tl.store(weighed + row * DIM + dim, x.to(weighed.dtype.element_ty), mask=dim < DIM)
    tl.store(joined + row, peak + tl.log(total))


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Same as the reference."""
    (out, lse), *others = ((x.contiguous(), lse.contiguous()) for x, lse in parts)
    dim, block = out.shape[-1], triton.next_power_of_2(out.shape[-1])
    for number, (other, other_lse) in enumerate(others):
        a, out = out, torch.empty_like(out)
        _merge_two[(lse.numel(),)](a, lse, other, other_lse, out, DIM=dim, DIM_BLOCK=block, num_warps=1)
        if number + 1 < len(others):
            lse = torch.logaddexp(lse, other_lse)
    return out


@triton.jit
def _merge_two(a, lse_a, b, lse_b, out, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM_BLOCK)
    first, second = tl.load(lse_a + row), tl.load(lse_b + row)
    peak = tl.maximum(first, second)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # both parts may have no tokens
    weight_a, weight_b = tl.exp(first - peak), tl.exp(second - peak)
    x = tl.load(a + row * DIM + dim, mask=dim < DIM).to(tl.float32)
    y = tl.load(b + row * DIM + dim, mask=dim < DIM).to(tl.float32)
    total = weight_a + weight_b
    merged = (weight_a * x + weight_b * y) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)
