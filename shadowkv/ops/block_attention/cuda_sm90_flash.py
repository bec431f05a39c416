"""Attention with its log-sum-exp on Hopper: our kernel, and flash attention for few queries."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.attend_blocks.cuda_sm90 import missing, supports
from shadowkv.ops.fused_attention import attend_by_size

__all__ = ["block_attention", "missing", "supports"]


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Same as the reference, for 16-bit dtypes and head dims of 64 or 128; the last dimension of every tensor is dense.
    Which of two kernels runs depends on how many queries a call has (``fused_attention.attend_by_size``)."""
    return attend_by_size(q, k, v, causal)
