"""Causal prefill attention by flash-attn, without scores in memory."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.block_attention.flash_attn import attend, missing, supports

__all__ = ["causal_attention", "missing", "supports"]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Same as the reference, for 16-bit dtypes and head dims that are multiples of 8 up to 256; can be captured in a
    CUDA graph."""
    return attend(q, k, v, causal=True)[0]
