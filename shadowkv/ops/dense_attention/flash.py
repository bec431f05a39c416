"""PyTorch's flash attention with its log-sum-exp. Several backends of this op call it."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes attention of q [n, H_q, d] over k, v [m, H, d]. Returns the result [n, H_q, d] and its log-sum-exp,
    float32 [n, H_q]. The dtype has 16 bits, and the head dim is a multiple of 8 up to 256. If ``causal``, the
    queries are the last n of m positions."""
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal)
    return out[0].transpose(0, 1), lse[0].T
