"""Causal prefill attention through FlashInfer."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops import flashinfer_attention
from shadowkv.ops.causal_attention import cuda

available = flashinfer_attention.available


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the reference; what FlashInfer is not used for goes to PyTorch."""
    if not flashinfer_attention.serves(q):
        return cuda.causal_attention(q, k, v)
    return flashinfer_attention.attend(q, k, v, causal=True)[0]
