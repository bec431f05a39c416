"""activation(gate) * up in one Triton kernel: SiLU, and the gates of ``gelu_mul`` and ``clamped_silu_mul``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.clamped_silu_mul.reference import ALPHA, LIMIT

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Same as the reference."""
    return multiply(gate_up, "silu")


def multiply(gate_up: Tensor, gate: str) -> Tensor:
    """[..., 2n], gate before up -> [..., n]; ``gate`` is "silu", "gelu" (its approximation with tanh) or
    "clamped_silu" (the product alone is rounded)."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    grid = out.numel() // size, triton.cdiv(size, BLOCK)
    _multiply[grid](gate_up, out, GATE=gate, ALPHA=ALPHA, LIMIT=LIMIT, SIZE=size, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _multiply(
    gate_up,
    out,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=column < SIZE).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=column < SIZE)
    if GATE == "clamped_silu":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT) + 1
        inner = ALPHA * gate
    elif GATE == "gelu":  # (1 + tanh(x)) / 2 = 1 / (1 + exp(-2x)); the factor is 2 times the root of 2 / pi
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    gated = (gate / (1 + tl.exp(-inner))).to(up.dtype) * up  # of numbers to round, rounded in between, as in PyTorch
    tl.store(out + row * SIZE + column, gated.to(out.dtype.element_ty), mask=column < SIZE)
