"""Matrix products of scaled 8-bit floats in PyTorch: dequantized, multiplied in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def scaled_matmul(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns (codes · scale) (weight · weight_scale)ᵀ + bias.

    Args:
        codes: float8_e4m3fn [T, K], activations of T tokens.
        scale: float32 [T, 1].
        weight: float8_e4m3fn [N, K].
        weight_scale: float32 [N, 1].
        bias: [N], or None.
        dtype: dtype of the result.

    Returns:
        [T, N].
    """
    wide = F.linear(codes.float() * scale, weight.float() * weight_scale, None if bias is None else bias.float())
    return wide.to(dtype)
