"""Decode attention over the pages that hold a sliding window, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_window_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, starts: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention over pages, each with a contiguous range of valid tokens.

    Args:
        q: [B, H_q, d], query heads of B sequences, after RoPE.
        k, v: [N, H, 64, d], kv heads of 64 tokens per page, views over all N pages.
        pages: int64 [B, E], E page ids per sequence.
        starts, counts: int64 [B, E]. In each page, the tokens from ``starts`` up to, but without, ``counts`` are valid.
            A page is skipped if its count is not above its start.

    Returns:
        out [B, H_q, d] in the dtype of ``q`` and its log-sum-exp, float32 [B, H_q]: 0 and -inf for a row without
        tokens.
    """
    heads, page = k.shape[1], k.shape[2]
    token = torch.arange(page, device=q.device)
    valid = ((token >= starts.unsqueeze(-1)) & (token < counts.unsqueeze(-1))).flatten(1)[:, None, None]  # [B, 1, 1, S]
    keys, values = (x[pages].transpose(1, 2).flatten(2, 3) for x in (k, v))  # [B, H, S, d]
    grouped = q.unflatten(1, (heads, -1))
    scores = (grouped @ keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~valid, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    weights = (scores - total.where(total > float("-inf"), 0)).exp()
    # Rows that are not valid may hold NaN, and 0 * NaN is NaN.
    out = weights.to(v.dtype) @ values.masked_fill(~valid[:, :, 0, :, None], 0)
    return out.flatten(1, 2).to(q.dtype), total.squeeze(-1).flatten(1)
