"""silu(gate) * up in PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2n], gate before up -> [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
