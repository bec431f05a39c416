"""clamp(gate) * sigmoid(1.702 * clamp(gate)) * (clamp(up) + 1) in PyTorch."""

from __future__ import annotations

from torch import Tensor

ALPHA = 1.702
"""Factor within the sigmoid, which makes it close to GELU (arXiv:1606.08415)."""

LIMIT = 7.0
"""Gates are at most this, and up is between minus this and this."""


def clamped_silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2n], gate before up -> [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * (ALPHA * gate).sigmoid())
