"""Outlier detection in PyTorch (ShadowKV, arXiv:2410.21465, section 4.2)."""

from __future__ import annotations

from torch import Tensor


def find_outliers(rotated: Tensor, chunk: int, count: int) -> Tensor:
    """The chunks whose mean has the lowest cosine similarity with one of its members.

    Args:
        rotated: [S, H, d], S a multiple of ``chunk``; the first chunk (the sink) is not a candidate.
        count: how many, at most S / chunk - 1.

    Returns:
        int64 [H, count], chunk numbers.
    """
    members = rotated.unflatten(0, (-1, chunk)).float()  # [chunks, c, H, d]
    mean = members.mean(1, keepdim=True)
    norms = members.norm(dim=-1) * mean.norm(dim=-1)
    worst = ((members * mean).sum(-1) / norms.clamp(min=1e-12)).amin(1)  # [chunks, H]
    return worst[1:].topk(count, dim=0, largest=False).indices.T + 1
