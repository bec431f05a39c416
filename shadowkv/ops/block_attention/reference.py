"""Attention with its log-sum-exp in PyTorch, for extending a cached sequence block by block."""

from __future__ import annotations

import torch
from torch import Tensor

SCORES_AT_ONCE = 2**24
"""Most scores, over all query heads, that are in memory at once: 64 MB in float32."""


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Softmax attention of queries [n, H_q, d] over one block of keys and values [H, m, d], n and m at least 1.

    Args:
        causal: the queries are the last n of the m positions, and each sees those up to its own.

    Returns:
        out [n, H_q, d] in the dtype of ``q`` and float32 log-sum-exp [n, H_q].
    """
    n, m = len(q), k.shape[1]
    rows = max(1, SCORES_AT_ONCE // (q.shape[1] * m))
    parts = []
    for start in range(0, n, rows):
        some = q[start : start + rows]
        seen = m - n + start + len(some) if causal else m
        parts.append(_attend(some, k[:, :seen], v[:, :seen], causal))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    n, _, dim = q.shape
    heads, m = k.shape[:2]
    grouped = q.view(n, heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)  # [H, G * n, d]
    scores = (grouped @ k.transpose(-1, -2)).float().unflatten(1, (-1, n)) * dim**-0.5
    if causal:
        later = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        scores.masked_fill_(later, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().flatten(1, 2)
    out = (weights.to(v.dtype) @ v).unflatten(1, (-1, n))  # [H, G, n, d]
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype), lse.squeeze(-1).permute(2, 0, 1).flatten(1)
