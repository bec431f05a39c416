"""Norms, gated activations and quantization of rows in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension, [..., n] in the dtype of ``x`` [..., n].

    ``weight`` [n] has the dtype of ``x``, as in most models' reference implementations, or float32, as in Gemma's. x /
    rms(x) is rounded to the dtype of ``weight`` before the multiplication.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + delta and its RMSNorm, both [..., n] in the dtype of ``x``. ``weight`` is [n], as in ``rms_norm``."""
    x = x + delta
    return x, rms_norm(x, weight, eps)


ALPHA = 1.702
"""Factor within the sigmoid of ``clamped_silu``. With this factor, the activation is close to GELU
(arXiv:1606.08415)."""

LIMIT = 7.0
"""``clamped_silu`` clamps ``gate`` to at most this, and ``up`` to the range from -LIMIT to LIMIT."""


def inputs_of(activation: str) -> int:
    """Number of inputs of ``gated_activation`` for each result: 2, or 1 with ``relu2``, which has no gate."""
    return 1 if activation == "relu2" else 2


def gated_activation(gate_up: Tensor, activation: str, offsets: Tensor | None = None) -> Tensor:
    """Returns activation(gate) * up, [..., n].

    Args:
        gate_up: [..., 2n], n numbers of ``gate``, then n of ``up``. With ``relu2``, [..., n], ``up`` alone.
        activation: ``silu``; ``gelu_pytorch_tanh``, GELU's approximation with tanh (arXiv:1606.08415);
            ``clamped_silu`` of gpt-oss, clamp(gate) * sigmoid(1.702 * clamp(gate)) * (clamp(up) + 1)
            (arXiv:2508.10925); or ``relu2``, relu(up) * up (squared ReLU, arXiv:2109.08668).
        offsets: int32 [E + 1] for E experts, as for ``grouped_matmul``. If given, ``gate_up`` has S rows, sorted by
            expert. Rows of ``gate_up`` and of the result from ``offsets[-1]`` on are arbitrary.
    """
    if activation == "relu2":
        return F.relu(gate_up) * gate_up
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_pytorch_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "clamped_silu":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * (gate * (ALPHA * gate).sigmoid())
    raise ValueError(f"activation {activation!r} is not silu, gelu_pytorch_tanh, clamped_silu or relu2")


FP8 = torch.float8_e4m3fn

STEP = 1 / 448
"""1 / the format's largest number."""

MIN_SCALE = 2.0**-126
"""Minimum scale: the smallest normal float32. A row of zeros gets this scale, so that it can be divided by its
scale."""


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of rows. The largest magnitude of a row becomes 448, the format's largest number.

    Args:
        x: [T, D], any dtype, D at least 1. A row with NaN gets NaN codes. A row with infinity gets an infinite scale,
            so that its products are NaN.

    Returns:
        Codes, float8_e4m3fn [T, D], rounded to nearest, ties to even; scales, float32 [T, 1]. Code times scale differs
        from the original number by at most 1/16 of this number or 2^-10 times the scale, whichever is more.
    """
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) * STEP).clamp(min=MIN_SCALE)
    return (wide * (1 / scale)).to(FP8), scale
