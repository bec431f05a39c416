"""Causal prefill attention within a window, through PyTorch's fused kernels with a mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERIES_AT_ONCE = 1024
"""Queries that attend at a time: their keys are few more than a window has."""


def causal_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention [n, H_q, d] of q [n, H_q, d], the last n of m positions, over k, v [m, H, d], each over the newest
    ``window`` positions up to its own."""
    n, m = q.shape[0], k.shape[0]
    out = torch.empty_like(q)
    for start in range(0, n, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, n)
        first, last = max(0, m - n + start - window + 1), m - n + stop
        mask = torch.ones(stop - start, last - first, dtype=torch.bool, device=q.device)
        mask = mask.tril(m - n + start - first).triu(m - n + start - first - window + 1)
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[start:stop], k[first:last], v[first:last]))
        some = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        out[start:stop] = some.squeeze(0).transpose(0, 1)
    return out
