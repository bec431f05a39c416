"""Gated MLP (SwiGLU, arXiv:2002.05202) with gate and up projections joined in one matrix product."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.layers.linear import Linear
from shadowkv.layers.spec import LayerSpec


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.gate_up = Linear(
            spec.hidden_size, 2 * spec.intermediate_size, bias=False, dtype=spec.dtype, device=spec.device
        )
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=False, dtype=spec.dtype, device=spec.device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
