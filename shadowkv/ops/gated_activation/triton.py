"""activation(gate) * up in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.gated_activation.reference import ALPHA, LIMIT

BLOCK = 1024

VARIANTS = {"silu": (False, 1.0, None), "gelu_pytorch_tanh": (True, 1.0, None), "clamped_silu": (False, ALPHA, LIMIT)}
"""Activation → whether it is GELU, the factor within the sigmoid (unused by GELU), and the limit (None: no
clamping)."""


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """Same as the reference, but ``clamped_silu`` rounds only the product."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    grid = out.numel() // size, triton.cdiv(size, BLOCK)
    gelu, alpha, limit = VARIANTS[activation]
    _multiply[grid](gate_up, out, GELU=gelu, ALPHA=alpha, LIMIT=limit, SIZE=size, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _multiply(
    gate_up,
    out,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=column < SIZE).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=column < SIZE)
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT) + 1
    if GELU:  # (1 + tanh(x)) / 2 = 1 / (1 + exp(-2x)); the factor is 2 times the root of 2 / pi
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = ALPHA * gate
    gated = (gate / (1 + tl.exp(-inner))).to(up.dtype) * up  # rounded in between like PyTorch, except clamped_silu
    tl.store(out + row * SIZE + column, gated.to(out.dtype.element_ty), mask=column < SIZE)
