"""Causal prefill attention through FlashInfer."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops import flashinfer_attention

available, supports = flashinfer_attention.available, flashinfer_attention.supports


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the reference, in bfloat16 with a head dim of 128."""
    return flashinfer_attention.attend(q, k, v, causal=True)[0]
