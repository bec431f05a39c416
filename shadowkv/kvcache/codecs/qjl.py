"""QJL (arXiv:2406.03482): codes the residual of a row as its norm and the signs of its products with a rotation.

The estimate is unbiased in every direction, unlike the levels of a quantiser, which are too short. Its squared error is
pi / 2 - 1 = 0.571 of the residual's squared norm with a rotation; with the paper's Gaussian matrix it is more than the
whole residual.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kappa(dim: int) -> float:
    """The factor of the signs, after they are rotated back, for a residual of norm 1. With Gaussian rows, which are
    sqrt(dim) times as long as those of a rotation, it would be sqrt(pi / 2) / dim."""
    return math.sqrt(math.pi / 2 / dim)


def signs(rest: Tensor, rotation: Tensor) -> Tensor:
    """Signs uint8 [..., d] of the products of rows float32 [..., d] and the columns of a rotation [d, d]: 1 for
    products of at least 0."""
    return (rest @ rotation >= 0).to(torch.uint8)


def estimate(signs: Tensor, norm: Tensor, rotation: Tensor) -> Tensor:
    """Estimated rows float32 [..., d] from ``signs`` uint8 [..., d] and norms [..., 1]."""
    return kappa(signs.shape[-1]) * norm * ((2.0 * signs - 1) @ rotation.T)
