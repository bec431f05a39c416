"""gelu(gate) * up in one Triton kernel, ``silu_mul``'s."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.silu_mul.triton import multiply


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Same as the reference."""
    return multiply(gate_up, gelu=True)
