"""Landmark scoring in PyTorch (ShadowKV, arXiv:2410.21465, algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_mean_scores(q: Tensor, landmarks: Tensor, pages: Tensor, excluded: Tensor) -> Tensor:
    """Softmax over chunks of q . landmark, then the largest over the query heads that share a kv head.

    Args:
        q: [B, H_q, d], rotated.
        landmarks: [N, H, C, d], views over all pages.
        pages: int64 [B, P].
        excluded: bool [B, H, P * C], chunks that may not be selected.

    Returns:
        float32 [B, H, P * C], -inf where excluded.
    """
    batch, _, dim = q.shape
    keys = landmarks[pages].transpose(1, 2).flatten(2, 3)  # [B, H, P * C, d]
    logits = q.view(batch, keys.shape[1], -1, dim) @ keys.transpose(-1, -2)
    return normalise(logits.float() * dim**-0.5, excluded)


def normalise(logits: Tensor, excluded: Tensor) -> Tensor:
    """Softmax of [B, H, G, chunks] over the chunks that are not excluded, maximum over G; -inf where excluded."""
    logits = logits.masked_fill(excluded.unsqueeze(2), float("-inf"))
    # A row with every chunk excluded has a softmax of NaN; the mask below takes it back.
    shares = torch.softmax(logits, dim=-1).amax(2)
    return shares.masked_fill(excluded, float("-inf"))
