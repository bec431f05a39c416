"""Truncated SVD through the Gram matrix in PyTorch: its cost does not grow with the rank, and barely with S."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 65536


def low_rank_basis(keys: Tensor, rank: int, mean: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Top right singular vectors of ``keys``, less ``mean`` if that is given.

    Args:
        keys: [S, n], before the rotation, the kv heads joined.
        rank: how many.
        mean: [n].

    Returns:
        basis float32 [rank, n] with orthonormal rows, strongest first; the share of the squared norm that it keeps, a
        float32 scalar tensor; and the largest absolute latent (keys x transposed basis) of each row, float32 [rank].
    """
    gram = keys.new_zeros(keys.shape[1], keys.shape[1], dtype=torch.float32)
    for block in keys.split(ROWS_AT_ONCE):
        wide = _centred(block, mean)
        gram.addmm_(wide.T, wide)
    # Keys that overflowed (NaN, infinity) must not stop everybody: their sequence's logits say so soon enough.
    values, vectors = torch.linalg.eigh(gram.nan_to_num_(0.0, 0.0, 0.0))
    kept = values[-rank:].clamp(min=0).sum() / values.clamp(min=0).sum().clamp(min=1e-30)
    basis = vectors[:, -rank:].flip(1).T.contiguous()
    largest = basis.new_zeros(rank)
    for block in keys.split(ROWS_AT_ONCE):
        largest = torch.maximum(largest, (_centred(block, mean) @ basis.T).abs().amax(0))
    return basis, kept, largest


def _centred(block: Tensor, mean: Tensor | None) -> Tensor:
    return block.float() if mean is None else block.float() - mean.float()
