"""gelu(gate) * up in PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gelu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2n], gate before up -> [..., n]; GELU by its approximation with tanh (arXiv:1606.08415)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
