"""Linear projections, unquantized or in 8-bit floats. One ``Linear`` can join several projections, such as queries,
keys and values. ``rows`` computes a range of the outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.layers.computing import Computing
from shadowkv.ops.activation_rows.reference import FP8

SCALE = "_scale"
"""Suffix of the name of a quantized weight's scales."""


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
        """Computes only the outputs ``start`` to ``stop``: [..., in_features] -> [..., stop - start]. No weights are
        copied."""
        bias = None if self.bias is None else self.bias[start:stop]
        return F.linear(x, self.weight[start:stop], bias)


class FP8Linear(Computing):
    """y = x Wᵀ + b over packed tokens, in 8-bit floats. Weights have a scale per output row, and activations are
    quantized per token. The weights are uninitialised until a loader fills them.

    Attributes:
        weight: float8_e4m3fn [out_features, in_features].
        weight_scale: float32 [out_features, 1].
    """

    calls = ("quantize_tokens", "scaled_matmul")
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()

        def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.weight = empty(out_features, in_features, dtype=FP8)
        self.weight_scale = empty(out_features, 1, dtype=torch.float32)
        self.bias = empty(out_features, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features] in the dtype of ``x``."""
        return self.rows(x, 0, len(self.weight))

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Computes only the outputs ``start`` to ``stop``: [T, in_features] -> [T, stop - start]. No weights are
        copied."""
        codes, scale = self.ops.quantize_tokens(x)
        bias = None if self.bias is None else self.bias[start:stop]
        weight, weight_scale = self.weight[start:stop], self.weight_scale[start:stop]
        return self.ops.scaled_matmul(codes, scale, weight, weight_scale, bias, x.dtype)
