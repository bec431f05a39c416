"""RMSNorm in PyTorch. The mean square is computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension, [..., n] in the dtype of ``x`` [..., n].

    ``weight`` [n] has the dtype of ``x``, as in most models' reference implementations, or float32, as in Gemma's. x /
    rms(x) is rounded to the dtype of ``weight`` before they are multiplied.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)
