"""QJL (arXiv:2406.03482): what is left of a row, as the signs of its products with a rotation and its norm.

The estimate is right on average in every direction, where levels of a quantiser are too short. Its own error is
pi / 2 - 1 = 0.571 of what was left, with a rotation; with the Gaussian matrix of the paper it is more than all of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kappa(dim: int) -> float:
    """What products of signs and the transposed rotation are to be multiplied by, for a rest of norm 1. With Gaussian
    rows, which are sqrt(dim) longer than those of a rotation, it would be sqrt(pi / 2) / dim."""
    return math.sqrt(math.pi / 2 / dim)


def signs(rest: Tensor, rotation: Tensor) -> Tensor:
    """Which products of rows float32 [..., d] with the columns of a rotation [d, d] are not below 0, uint8 [..., d]."""
    return (rest @ rotation >= 0).to(torch.uint8)


def estimate(signs: Tensor, norm: Tensor, rotation: Tensor) -> Tensor:
    """Rows float32 [..., d] of such signs and of norms [..., 1]."""
    return kappa(signs.shape[-1]) * norm * ((2.0 * signs - 1) @ rotation.T)
