"""RMSNorm in PyTorch, the mean square in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: [..., n] and [n] -> [..., n] in the dtype of ``x``."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded to the low precision before the weight, as the reference implementations of these models do.
    return weight * (wide * scale).to(x.dtype)
