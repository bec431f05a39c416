"""Attention with its log-sum-exp through PyTorch's fused kernels for GPUs, with no scores in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.block_attention import reference
from shadowkv.ops.fused_attention import attend


def available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """As the reference, which serves float32 and head dims that are no multiple of 8 or above 256; the last dimension
    of all is dense."""
    dim = q.shape[-1]
    if q.dtype == torch.float32 or dim % 8 or dim > 256:
        return reference.block_attention(q, k, v, causal)
    return attend(q, k, v, causal)
