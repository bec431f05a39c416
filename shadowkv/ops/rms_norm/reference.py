"""RMSNorm in PyTorch. The mean square is computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, [..., n] in the dtype of ``x`` [..., n].

    The dtype of ``weight`` [n] is that of ``x`` or float32. Numbers are rounded to it before they are multiplied. Most
    models' reference implementations have the former, Gemma's the latter.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)
