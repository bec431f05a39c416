"""Attention over gathered keys and values in PyTorch."""

from __future__ import annotations

from torch import Tensor


def selected_attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention of [B, H_q, d] over [B, H, m, d] where ``valid`` bool [B, H, m].

    Returns:
        out [B, H_q, d] in the dtype of ``q`` (0 where nothing is valid) and float32 log-sum-exp [B, H_q] (-inf there).
    """
    batch, _, dim = q.shape
    scores = (q.view(batch, k.shape[1], -1, dim) @ k.transpose(-1, -2)).float() * dim**-0.5
    scores = scores.masked_fill(~valid.unsqueeze(2), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)).exp()
    out = weights.to(v.dtype) @ v.masked_fill(~valid.unsqueeze(-1), 0)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)
