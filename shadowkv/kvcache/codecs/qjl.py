"""QJL (arXiv:2406.03482): the residual of a row, as the signs of its products with a rotation and its norm.

The estimate is right on average in every direction, where levels of a quantiser are too short. Its own error is
pi / 2 - 1 = 0.571 of the residual with a rotation; with the paper's Gaussian matrix it is more than the whole residual.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kappa(dim: int) -> float:
    """The factor for signs that are rotated back, for a residual of norm 1. With Gaussian rows, which are sqrt(dim)
    longer than those of a rotation, it would be sqrt(pi / 2) / dim."""
    return math.sqrt(math.pi / 2 / dim)


def signs(rest: Tensor, rotation: Tensor) -> Tensor:
    """Which products of rows float32 [..., d] with the columns of a rotation [d, d] are not below 0, uint8 [..., d]."""
    return (rest @ rotation >= 0).to(torch.uint8)


def estimate(signs: Tensor, norm: Tensor, rotation: Tensor) -> Tensor:
    """Rows float32 [..., d] from such signs and from norms [..., 1]."""
    return kappa(signs.shape[-1]) * norm * ((2.0 * signs - 1) @ rotation.T)
