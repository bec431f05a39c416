"""Matrix products of scaled 8-bit floats on tensor cores, by the libraries that come with PyTorch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.extension import gpu_missing

MIN_CAPABILITY = (8, 9)
"""Compute capability of Ada. Older GPUs have no tensor cores for 8-bit floats."""

MULTIPLE = 16
"""K and N must be multiples of this."""

missing = partial(gpu_missing, MIN_CAPABILITY)


def scaled_matmul(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Same as the reference, with result and bias in bfloat16. All rows must be contiguous.

    Raises:
        ValueError: another dtype, or K or N is not a multiple of 16.
    """
    out_features, in_features = weight.shape
    if dtype != torch.bfloat16:
        raise ValueError(f"scaled_matmul on a GPU gives torch.bfloat16, not {dtype}")
    if out_features % MULTIPLE or in_features % MULTIPLE:
        raise ValueError(f"scaled_matmul on a GPU needs multiples of {MULTIPLE}, not {out_features} x {in_features}")
    if not len(codes):
        return codes.new_empty(0, out_features, dtype=dtype)
    # Sums have the tensor cores' own precision, as in vLLM. Their error is less than that of rounding to three bits of
    # mantissa.
    out = torch._scaled_mm(
        codes, weight.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=dtype, use_fast_accum=True
    )
    return out if bias is None else out.add_(bias)  # cuBLAS has no kernel with a bias for few long rows
