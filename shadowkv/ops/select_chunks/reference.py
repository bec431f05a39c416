"""Ragged top-k in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def select_chunks(scores: Tensor, budget: Tensor, max_budget: int) -> Tensor:
    """The ``budget`` best chunks per sequence and kv head.

    Args:
        scores: float32 [B, H, chunks], -inf where a chunk may not be selected.
        budget: int64 [B].
        max_budget: the largest of ``budget``.

    Returns:
        int64 [B, H, k] with k = min(max_budget, chunks), in any order, -1 where there is none.
    """
    k = min(max_budget, scores.shape[-1])
    best, chosen = scores.topk(k, dim=-1)
    beyond = torch.arange(k, device=scores.device) >= budget[:, None, None]
    return chosen.masked_fill(beyond | (best == float("-inf")), -1)
