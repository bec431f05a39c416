"""activation(gate) * up in PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

ALPHA = 1.702
"""Factor within the sigmoid of ``clamped_silu``. With it the activation is close to GELU (arXiv:1606.08415)."""

LIMIT = 7.0
"""``clamped_silu`` clamps ``gate`` to at most this, and ``up`` to the range from -LIMIT to LIMIT."""


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """Returns activation(gate) * up, [..., n].

    Args:
        gate_up: [..., 2n], n numbers of ``gate``, then n of ``up``.
        activation: ``silu``; ``gelu_pytorch_tanh``, GELU's approximation with tanh (arXiv:1606.08415); or
            ``clamped_silu`` of gpt-oss, clamp(gate) * sigmoid(1.702 * clamp(gate)) * (clamp(up) + 1)
            (arXiv:2508.10925).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_pytorch_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "clamped_silu":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * (gate * (ALPHA * gate).sigmoid())
    raise ValueError(f"activation {activation!r} is not silu, gelu_pytorch_tanh or clamped_silu")
