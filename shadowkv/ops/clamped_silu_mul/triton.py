"""The gate of gpt-oss in one Triton kernel, ``silu_mul``'s."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.clamped_silu_mul.reference import ALPHA, LIMIT
from shadowkv.ops.silu_mul.triton import multiply


def clamped_silu_mul(gate_up: Tensor) -> Tensor:
    """Same as the reference, with the product alone rounded."""
    return multiply(gate_up, clamp=(ALPHA, LIMIT))
