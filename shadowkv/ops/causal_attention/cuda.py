"""Causal prefill attention through PyTorch's fused kernels for GPUs, with no mask in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from shadowkv.ops.fused_attention import STEP, attend, is_large
from shadowkv.ops.merge_attention import triton as merge


def available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the reference. float32 and head dims that are no multiple of 8 take a mask of n x m, others none."""
    n, m = len(q), len(k)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if q.dtype == torch.float32 or q.shape[-1] % 8 or q.shape[-1] > 256:
        q, bias = q.transpose(0, 1)[None], causal_lower_right(n, m)
        return scaled_dot_product_attention(q, k[None], v[None], bias, enable_gqa=True)[0].transpose(0, 1)
    before = (m - n) // STEP * STEP
    if not is_large(q, before):
        return attend(q, k, v, causal=True)[0]
    parts = [attend(q, k[:, :before], v[:, :before]), attend(q, k[:, before:], v[:, before:], causal=True)]
    return merge.merge_attention(parts)
