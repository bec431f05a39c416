"""RMSNorm in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same as the reference. The last dimension must be contiguous. ``x`` [T, H, d] may be a view of the queries or
    keys in a product that holds queries, keys and values."""
    size, block = x.shape[-1], triton.next_power_of_2(x.shape[-1])
    rows = x if x.ndim == 3 else x.reshape(1, -1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm[(x.numel() // size,)](
        rows, weight, out, *rows.stride()[:2], rows.shape[1], eps, SIZE=size, BLOCK=block, num_warps=_warps(block)
    )
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@triton.jit(do_not_specialize=["inner"])
def _rms_norm(x, weight, out, outer_stride, inner_stride, inner, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Normalises one row. Rows are in groups of ``inner``: ``inner_stride`` lies between rows, ``outer_stride`` between
    groups."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    place = x + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    wide = tl.load(place + column, mask=column < SIZE, other=0.0).to(tl.float32)
    normed = normalised(wide, weight, column, eps, SIZE)
    tl.store(out + row.to(tl.int64) * SIZE + column, normed, mask=column < SIZE)


@triton.jit
def normalised(wide, weight, column, eps, SIZE: tl.constexpr):
    """One row divided by its root mean square, rounded to the weight's type, times the weight."""
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    return (wide * scale).to(weight.dtype.element_ty) * tl.load(weight + column, mask=column < SIZE, other=0.0)
