"""Rows in float8_e4m3fn in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn

STEP = 1 / 448
"""1 / the largest number of the format."""

MIN_SCALE = 2.0**-126
"""The smallest normal float32, so that rows of zeros have a scale to divide by."""


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows: the largest magnitude of each becomes 448, the largest number of the format.

    Args:
        x: [T, D], any dtype, D at least 1; a row with NaN gets NaN codes, a row with infinity gets an infinite scale,
            so that its products are NaN.

    Returns:
        Codes, float8_e4m3fn [T, D], rounded to nearest, ties to even; scales, float32 [T, 1]. Codes times scales are
        off by at most 1/16 of a number, or by half of 2^-9 of the scale where that is more.
    """
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) * STEP).clamp(min=MIN_SCALE)
    return (wide * (1 / scale)).to(FP8), scale
