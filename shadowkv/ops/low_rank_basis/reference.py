"""Truncated SVD through the Gram matrix in PyTorch: its cost does not grow with the rank, and barely with S."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 65536


def low_rank_basis(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Top right singular vectors of ``keys``.

    Args:
        keys: [S, n], before the rotation, the kv heads joined.
        rank: how many.

    Returns:
        basis float32 [rank, n] with orthonormal rows, strongest first, and the share of the squared norm that it
        keeps, a float32 scalar tensor.
    """
    gram = keys.new_zeros(keys.shape[1], keys.shape[1], dtype=torch.float32)
    for block in keys.split(ROWS_AT_ONCE):
        wide = block.float()
        gram.addmm_(wide.T, wide)
    # Keys that overflowed (NaN, infinity) must not stop everybody: their sequence's logits say so soon enough.
    values, vectors = torch.linalg.eigh(gram.nan_to_num_(0.0, 0.0, 0.0))
    kept = values[-rank:].clamp(min=0).sum() / values.clamp(min=0).sum().clamp(min=1e-30)
    return vectors[:, -rank:].flip(1).T.contiguous(), kept
