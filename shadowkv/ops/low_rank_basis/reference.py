"""Truncated SVDs through Gram matrices in PyTorch. The eigendecomposition costs the same for any rank and any number of
keys."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 65536


def low_rank_basis(keys: Tensor, rank: int, mean: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the leading right singular vectors of M matrices of keys. If ``mean`` is given, it is subtracted from the
    keys first.

    Args:
        keys: [M, S, n], keys of S tokens before RoPE, with their kv heads concatenated.
        rank: number of vectors.
        mean: [M, n], or None.

    Returns:
        Four tensors. The first is the basis, float32 [M, rank, n], with orthonormal rows, strongest first. Latents are
        the products of its rows with the keys. The second and the third have the mean square and the largest absolute
        value of each row's latents, float32 [M, rank] each. The fourth has the mean squared norm of the keys, float32
        [M].
    """
    gram = keys.new_zeros(len(keys), keys.shape[2], keys.shape[2], dtype=torch.float32)
    for block in keys.split(ROWS_AT_ONCE, dim=1):
        wide = _centred(block, mean)
        gram.baddbmm_(wide.transpose(1, 2), wide)
    # eigh raises an error for infinite or NaN entries, and the error would end every sequence of the batch. So these
    # entries become 0. A sequence with overflowed keys gets non-finite logits, which are reported for it alone.
    values, vectors = torch.linalg.eigh(gram.nan_to_num_(0.0, 0.0, 0.0))
    values = values.clamp(min=0) / keys.shape[1]
    basis = vectors[:, :, -rank:].flip(2).transpose(1, 2).contiguous()
    largest = basis.new_zeros(len(keys), rank)
    for block in keys.split(ROWS_AT_ONCE, dim=1):
        largest = torch.maximum(largest, (_centred(block, mean) @ basis.transpose(1, 2)).abs().amax(1))
    return basis, values[:, -rank:].flip(1), largest, values.sum(1)


def _centred(block: Tensor, mean: Tensor | None) -> Tensor:
    return block.float() if mean is None else block.float() - mean.float().unsqueeze(1)
