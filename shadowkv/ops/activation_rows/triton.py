"""Norms, gated activations and quantization of rows in Triton. Each is one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.activation_rows.reference import ALPHA, FP8, LIMIT, MIN_SCALE, STEP, inputs_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same as the reference. The last dimension must be contiguous. ``x`` [T, H, d] may be a view of the queries or
    keys in the output of a fused QKV projection."""
    size, block = x.shape[-1], triton.next_power_of_2(x.shape[-1])
    rows = x if x.ndim == 3 else x.reshape(1, -1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm[(x.numel() // size,)](
        rows, weight, out, *rows.stride()[:2], rows.shape[1], eps, SIZE=size, BLOCK=block, num_warps=_warps(block)
    )
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@triton.jit(do_not_specialize=["inner"])
def _rms_norm(x, weight, out, outer_stride, inner_stride, inner, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Normalises one row. A group has ``inner`` rows, which are ``inner_stride`` elements apart. Groups are
    ``outer_stride`` elements apart."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    place = x + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    wide = tl.load(place + column, mask=column < SIZE, other=0.0).to(tl.float32)
    normed = normalised(wide, weight, column, eps, SIZE)
    tl.store(out + row.to(tl.int64) * SIZE + column, normed, mask=column < SIZE)


@triton.jit
def normalised(wide, weight, column, eps, SIZE: tl.constexpr):
    """One row divided by its root mean square, rounded to the weight's type, times the weight."""
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    return (wide * scale).to(weight.dtype.element_ty) * tl.load(weight + column, mask=column < SIZE, other=0.0)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Same as the reference."""
    size = x.shape[-1]
    x, delta = x.contiguous(), delta.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_rms_norm[(x.numel() // size,)](
        x, delta, weight, total, out, eps, SIZE=size, BLOCK=block, num_warps=_warps(block)
    )
    return total, out


@triton.jit
def _add_rms_norm(x, delta, weight, total, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    lives = column < SIZE
    added = tl.load(x + row + column, mask=lives, other=0.0) + tl.load(delta + row + column, mask=lives, other=0.0)
    tl.store(total + row + column, added, mask=lives)
    normed = normalised(added.to(tl.float32), weight, column, eps, SIZE)
    tl.store(out + row + column, normed, mask=lives)


GATED_BLOCK = 1024

VARIANTS = {
    "silu": (False, 1.0, None),
    "gelu_pytorch_tanh": (True, 1.0, None),
    "clamped_silu": (False, ALPHA, LIMIT),
    "relu2": (False, 1.0, None),
}
"""Activation → whether it is GELU, the factor within the sigmoid (unused by GELU and ``relu2``), and the limit (None:
no clamping)."""


def gated_activation(gate_up: Tensor, activation: str, offsets: Tensor | None = None) -> Tensor:
    """Same as the reference, but ``clamped_silu`` rounds only the final product. Rows from ``offsets[-1]`` on are
    neither read nor written."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // inputs_of(activation)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    grid = out.numel() // size, triton.cdiv(size, GATED_BLOCK)
    gelu, alpha, limit = VARIANTS[activation]
    _multiply[grid](
        gate_up, out, None if offsets is None else offsets[-1:], GELU=gelu, ALPHA=alpha, LIMIT=limit,
        PARTLY=offsets is not None, INPUTS=inputs_of(activation), SIZE=size, BLOCK=GATED_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["last"])
def _multiply(
    gate_up,
    out,
    last,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PARTLY: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = SIZE
    if PARTLY:
        size = tl.where(row < tl.load(last), SIZE, 0)
    gate = tl.load(gate_up + row * INPUTS * SIZE + column, mask=column < size).to(tl.float32)
    up = tl.load(gate_up + (row + 1) * INPUTS * SIZE - SIZE + column, mask=column < size)
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT) + 1
    if INPUTS == 1:  # relu2
        activated = tl.maximum(gate, 0.0)
    elif GELU:  # (1 + tanh(x)) / 2 = 1 / (1 + exp(-2x)); the factor is 2 times the root of 2 / pi
        activated = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        activated = gate / (1 + tl.exp(-ALPHA * gate))
    gated = activated.to(up.dtype) * up  # rounds twice like PyTorch, but once in clamped_silu
    tl.store(out + row * SIZE + column, gated.to(out.dtype.element_ty), mask=column < size)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Same as the reference. The last dimension must be contiguous."""
    rows, size = x.shape
    codes = torch.empty(rows, size, dtype=FP8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_tokens[(rows,)](
        x, codes, scale, x.stride(0), STEP, MIN_SCALE, SIZE=size, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return codes, scale


@triton.jit
def _quantize_tokens(x, codes, scale, row_stride, step, least, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    lives = column < SIZE
    wide = tl.load(x + row * row_stride + column, mask=lives, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=0) * step, least)
    tl.store(scale + row, largest)
    # Codes are rounded here, so that the conversion is exact: Triton's interpreter loses the carry when it rounds.
    # Adding and subtracting a large number leaves three bits of mantissa, or multiples of 2^-9 for codes below 2^-6.
    code = wide * tl.div_rn(1.0, largest)
    power = (tl.maximum(tl.abs(code), 0.015625).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    code = (code + 1572864.0 * power) - 1572864.0 * power
    tl.store(codes + row * SIZE + column, code.to(codes.dtype.element_ty), mask=lives)
