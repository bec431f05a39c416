"""Linear projection whose weights stay in a GGUF file's blocks of quantised numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shadowkv.layers.block_matrix import BlockMatrix, Run


class BlockLinear(nn.Module):
    """y = x Wᵀ + b over packed tokens. The weights are uninitialised until a loader fills them."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        runs: Iterable[Run],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight = BlockMatrix(in_features, runs, dtype=dtype, device=device)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features] in the dtype of ``x``."""
        return self.rows(x, 0, self.out_features)

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Outputs ``start`` to ``stop`` only: [T, in_features] -> [T, stop - start]; no weight is copied."""
        product: Tensor = self.weight(x, start, stop)
        return product if self.bias is None else product.add_(self.bias[start:stop])
