"""Attention with its log-sum-exp through FlashInfer."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops import flashinfer_attention

available, supports = flashinfer_attention.available, flashinfer_attention.supports


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """As the reference, in bfloat16 with a head dim of 128."""
    return flashinfer_attention.attend(q, k.transpose(0, 1), v.transpose(0, 1), causal)
