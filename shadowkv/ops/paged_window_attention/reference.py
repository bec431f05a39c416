"""Decode attention over the pages that hold a window of the newest tokens, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_window_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, starts: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax attention over pages that hold any number of valid tokens in a row.

    Args:
        q: [B, H_q, d], after RoPE.
        k, v: [N, H, 64, d], views over all pages.
        pages: int64 [B, E], page ids.
        starts, counts: int64 [B, E], the first valid token of each page, and the one after the last; any that is not
            after the first skips the page.

    Returns:
        out [B, H_q, d] in the dtype of ``q``, 0 for a row without tokens, and the log-sum-exp of its scores, float32
        [B, H_q], -inf for such a row.
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
    # Other rows may hold anything, NaN too, and 0 * NaN is NaN.
    out = weights.to(v.dtype) @ values.masked_fill(~valid[:, :, 0, :, None], 0)
    return out.flatten(1, 2).to(q.dtype), total.squeeze(-1).flatten(1)
