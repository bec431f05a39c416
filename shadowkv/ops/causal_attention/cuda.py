"""Causal prefill attention on a GPU, without scores in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from shadowkv.ops.block_attention.cuda import block_attention


def available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Same as the reference. float32 and head dims that are not a multiple of 8 need a mask of n x m."""
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if q.dtype == torch.float32 or q.shape[-1] % 8 or q.shape[-1] > 256:
        queries, bias = q.transpose(0, 1)[None], causal_lower_right(len(q), k.shape[1])
        return scaled_dot_product_attention(queries, k[None], v[None], bias, enable_gqa=True)[0].transpose(0, 1)
    return block_attention(q, k, v, causal=True)[0]
