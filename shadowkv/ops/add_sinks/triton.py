"""Adds learned sinks to partial attention in one Triton kernel."""

from __future__ import annotations

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
