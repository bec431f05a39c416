"""Quantises rows to float8_e4m3fn in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn

STEP = 1 / 448
"""1 / the format's largest number."""

MIN_SCALE = 2.0**-126
"""Minimum scale: the smallest normal float32. Even rows of zeros can be divided by it."""


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of rows. The largest magnitude of a row becomes 448, the format's largest number.

    Args:
        x: [T, D], any dtype, D at least 1. A row with NaN gets NaN codes. A row with infinity gets an infinite scale,
            so that its products are NaN.

    Returns:
        Codes, float8_e4m3fn [T, D], rounded to nearest, ties to even; scales, float32 [T, 1]. Code times scale differs
        from the number by at most 1/16 of it, or by 2^-10 times the scale if that is more.
    """
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) * STEP).clamp(min=MIN_SCALE)
    return (wide * (1 / scale)).to(FP8), scale
