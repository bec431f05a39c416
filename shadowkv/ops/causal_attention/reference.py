"""Causal prefill attention through PyTorch's fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention [n, H_q, d] of q [n, H_q, d], the last n of m positions, over k, v [m, H, d], each up to its own."""
    n, m = q.shape[0], k.shape[0]
    mask = None
    if n != m:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
