"""Gated MLP (SwiGLU, arXiv:2002.05202) with gate and up projections joined in one matrix product."""

from __future__ import annotations

from torch import Tensor, nn

from shadowkv.layers.projection import projection
from shadowkv.layers.spec import LayerSpec


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.ops = spec.ops
        self.gate_up = projection(spec, spec.hidden_size, 2 * spec.intermediate_size)
        self.down = projection(spec, spec.intermediate_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.down(self.ops.silu_mul(self.gate_up(x)))
