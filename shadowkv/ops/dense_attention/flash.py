"""PyTorch's flash attention with its log-sum-exp, for the backends of GPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention [n, H_q, d] of q [n, H_q, d] over k, v [m, H, d], and float32 log-sum-exp [n, H_q]; 16-bit dtypes, and
    head dims that are multiples of 8 up to 256."""
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal)
    return out[0].transpose(0, 1), lse[0].T
