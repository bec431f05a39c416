"""Attention with its log-sum-exp through FlashInfer."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops import flashinfer_attention
from shadowkv.ops.block_attention import cuda

available = flashinfer_attention.available


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """As the reference; what FlashInfer is not used for goes to PyTorch."""
    if not flashinfer_attention.serves(q):
        return cuda.block_attention(q, k, v, causal)
    return flashinfer_attention.attend(q, k.transpose(0, 1), v.transpose(0, 1), causal)
