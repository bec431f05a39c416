"""RMSNorm (arXiv:1910.07467) with the mean square accumulated in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shadowkv.layers.computing import Computing


class RMSNorm(Computing):
    """x / rms(x) * weight over the last dimension."""

    calls = ("add_rms_norm", "rms_norm")

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the dtype of x."""
        normed: Tensor = self.ops.rms_norm(x, self.weight, self.eps)
        return normed

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta and its norm, each [..., size]."""
        total, normed = self.ops.add_rms_norm(x, delta, self.weight, self.eps)
        return total, normed
