"""Linear projection whose weight may join several projections, with access to a run of its output rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x Wᵀ + b. The weights are uninitialised until a loader fills them."""

    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the weight."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Outputs ``start`` to ``stop`` only: [..., in_features] -> [..., stop - start]; no weight is copied."""
        bias = None if self.bias is None else self.bias[start:stop]
        return F.linear(x, self.weight[start:stop], bias)
