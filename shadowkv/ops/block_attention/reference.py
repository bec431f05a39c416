"""Attention with its log-sum-exp in PyTorch, for extending a cached sequence block by block."""

from __future__ import annotations

import torch
from torch import Tensor


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention of queries [n, H_q, d] over one block of keys and values [H, m, d].

    Args:
        valid: bool [H, m], keys that count; None means all.
        causal: the queries are the last n of the m positions.

    Returns:
        out [n, H_q, d] in the dtype of ``q`` (0 where nothing is valid) and float32 log-sum-exp [n, H_q] (-inf there).
    """
    n, _, dim = q.shape
    heads, m = k.shape[:2]
    grouped = q.view(n, heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)  # [H, G * n, d]
    scores = (grouped @ k.transpose(-1, -2)).float().unflatten(1, (-1, n)) * dim**-0.5
    if causal:
        scores.masked_fill_(
            torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n).logical_not(), float("-inf")
        )
    if valid is not None:
        scores.masked_fill_(~valid[:, None, None, :], float("-inf"))
        v = v.masked_fill(~valid.unsqueeze(-1), 0)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)).exp().flatten(1, 2)
    out = (weights.to(v.dtype) @ v).unflatten(1, (-1, n))  # [H, G, n, d]
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype), lse.squeeze(-1).permute(2, 0, 1).flatten(1)
