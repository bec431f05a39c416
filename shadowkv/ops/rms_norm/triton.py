"""RMSNorm in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same as the reference; the last dimension must be dense."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm[(len(flat),)](flat, weight, out, flat.stride(0), eps, SIZE=size, BLOCK=block, num_warps=_warps(block))
    return out.view(x.shape)


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@triton.jit
def _rms_norm(x, weight, out, row_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wide = tl.load(x + row * row_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    normed = normalised(wide, weight, column, eps, SIZE)
    tl.store(out + row * SIZE + column, normed, mask=column < SIZE)


@triton.jit
def normalised(wide, weight, column, eps, SIZE: tl.constexpr):
    """One row divided by its root mean square, rounded to the weight's type, times the weight."""
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    return (wide * scale).to(weight.dtype.element_ty) * tl.load(weight + column, mask=column < SIZE, other=0.0)
