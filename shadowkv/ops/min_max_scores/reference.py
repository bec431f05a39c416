"""Quest's upper bound in PyTorch (arXiv:2406.10774, section 3.2)."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.chunk_mean_scores.reference import normalise


def min_max_scores(q: Tensor, bounds: Tensor, pages: Tensor, excluded: Tensor) -> Tensor:
    """Softmax over chunks of the largest q . k that keys within the bounds can reach, maximum over the group.

    Args:
        q: [B, H_q, d], rotated.
        bounds: [N, H, 2, C, d], smallest and largest key per dimension, views over all pages.
        pages: int64 [B, P].
        excluded: bool [B, H, P * C].

    Returns:
        float32 [B, H, P * C], -inf where excluded.
    """
    batch, _, dim = q.shape
    low, high = bounds[pages].permute(3, 0, 2, 1, 4, 5).flatten(3, 4)  # [B, H, P * C, d] each
    grouped = q.view(batch, low.shape[1], -1, dim)
    logits = grouped.clamp(min=0) @ high.transpose(-1, -2) + grouped.clamp(max=0) @ low.transpose(-1, -2)
    return normalise(logits.float() * dim**-0.5, excluded)
