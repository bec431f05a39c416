"""Outlier detection in PyTorch (ShadowKV, arXiv:2410.21465, section 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def find_outliers(rope_keys: Tensor, chunk: int, count: int, sink: int = 1) -> Tensor:
    """The chunks whose mean has the lowest cosine similarity with one of their keys.

    Args:
        rope_keys: [S, H, d], after RoPE, S a multiple of ``chunk``.
        count: how many, at most S / chunk - ``sink``.
        sink: chunks at the start that are not candidates.

    Returns:
        int64 [H, count], chunk numbers.
    """
    if not count:
        return torch.empty(rope_keys.shape[1], 0, dtype=torch.int64, device=rope_keys.device)
    members = rope_keys.unflatten(0, (-1, chunk)).float()  # [chunks, c, H, d]
    mean = members.mean(1, keepdim=True)
    norms = members.norm(dim=-1) * mean.norm(dim=-1)
    worst = ((members * mean).sum(-1) / norms.clamp(min=1e-12)).amin(1)  # [chunks, H]
    return worst[sink:].topk(count, dim=0, largest=False).indices.T + sink
