"""Residual addition and RMSNorm in PyTorch."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.rms_norm.reference import rms_norm


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + delta and its RMSNorm, both [..., n] in the dtype of ``x``. ``weight`` is [n], as in ``rms_norm``."""
    x = x + delta
    return x, rms_norm(x, weight, eps)
