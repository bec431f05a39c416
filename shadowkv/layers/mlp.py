"""Gated MLP (SwiGLU, arXiv:2002.05202) with gate and up projections joined in one matrix product."""

from __future__ import annotations

from torch import Tensor

from shadowkv.layers.computing import Computing
from shadowkv.layers.projection import projection
from shadowkv.layers.spec import LayerSpec


class MLP(Computing):
    """down(silu(gate(x)) * up(x))."""

    calls = ("silu_mul",)

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.group = spec.group
        self.gate_up = projection(spec, "mlp.gate_up", spec.hidden_size, 2 * spec.intermediate_size)
        self.down = projection(spec, "mlp.down", spec.intermediate_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.group.sum(self.down(self.ops.silu_mul(self.gate_up(x))))
