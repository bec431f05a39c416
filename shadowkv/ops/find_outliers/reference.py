"""Outlier detection in PyTorch (ShadowKV, arXiv:2410.21465, section 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def find_outliers(rope_keys: Tensor, chunk: int, count: int, sink: int = 1) -> Tensor:
    """Finds the chunks that are represented worst by their mean key. A chunk is as bad as the lowest cosine similarity
    of its mean with one of its keys.

    Args:
        rope_keys: [S, H, d], keys of S tokens after RoPE. S is a multiple of ``chunk``.
        chunk: tokens of a chunk.
        count: number of chunks to find per kv head, at most S / chunk - ``sink``.
        sink: number of chunks at the start that are not candidates.

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
