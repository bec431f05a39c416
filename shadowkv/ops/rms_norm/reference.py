"""RMSNorm in PyTorch, the mean square in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: [..., n] and [n] -> [..., n] in the dtype of ``x``.

    ``weight`` is in that dtype, and numbers are rounded to it before they are multiplied, as the reference
    implementations of most models do; or it is in float32, and so is the product, as in those of Gemma.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)
