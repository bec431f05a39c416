"""Causal attention of packed sequences on Hopper: ``csrc/kernels/attend_blocks_sm90/``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shadowkv.ops.attend_blocks.cuda_sm90 import attend_sequences, missing, supports

__all__ = ["missing", "ragged_attention", "supports"]


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int] | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Same as the reference; sums are in float32. Can be captured in a CUDA graph.

    bfloat16 or float16 with a head dim of 64 or 128; strides between heads and tokens of q, k and v are multiples of
    16 bytes.
    """
    return attend_sequences(q, k, v, True, cu_seqlens, cu_seqlens_k)[0]
