"""Causal attention of packed sequences by flash-attn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shadowkv.ops.block_attention.flash_attn import missing, supports

__all__ = ["missing", "ragged_attention", "supports"]


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int] | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Same as the reference, for 16-bit dtypes and head dims that are multiples of 8 up to 256; can be captured in a
    CUDA graph."""
    if not len(q):
        return torch.empty_like(q)
    from flash_attn import flash_attn_varlen_func

    longest = len(q) if lengths is None else max(lengths)
    starts, most = (cu_seqlens, longest) if cu_seqlens_k is None else (cu_seqlens_k, len(k))
    out: Tensor = flash_attn_varlen_func(q, k, v, cu_seqlens, starts, longest, most, causal=True)
    return out
