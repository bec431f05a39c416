"""Residual addition and RMSNorm in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.rms_norm.triton import _warps, normalised


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Same as the reference."""
    size = x.shape[-1]
    x, delta = x.contiguous(), delta.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_rms_norm[(x.numel() // size,)](
        x, delta, weight, total, out, eps, SIZE=size, BLOCK=block, num_warps=_warps(block)
    )
    return total, out


@triton.jit
def _add_rms_norm(x, delta, weight, total, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    lives = column < SIZE
    added = tl.load(x + row + column, mask=lives, other=0.0) + tl.load(delta + row + column, mask=lives, other=0.0)
    tl.store(total + row + column, added, mask=lives)
    normed = normalised(added.to(tl.float32), weight, column, eps, SIZE)
    tl.store(out + row + column, normed, mask=lives)
