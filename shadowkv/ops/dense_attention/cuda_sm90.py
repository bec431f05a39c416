"""Dense attention on Hopper by our kernel (``csrc/kernels/attend_blocks_sm90/``). A multiprocessor computes a tile of
128 queries of one head, so few queries would leave many multiprocessors idle. A call with few queries uses PyTorch's
flash attention instead, which also splits the keys among multiprocessors."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.attend_blocks.cuda_sm90 import attend_sequences, missing, supports
from shadowkv.ops.dense_attention.cuda import flash_attention
from shadowkv.ops.dense_attention.forms import Packed
from shadowkv.ops.select_blocks.reference import BLOCK

__all__ = ["causal", "missing", "packed", "partial", "supports"]

MIN_TILES = 64
"""From this many tiles on, over all query heads, our kernel is faster than PyTorch's. This many tiles occupy about half
of a Hopper GPU's multiprocessors."""


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Same as the reference, for 16-bit dtypes and head dims of 64 or 128."""
    return partial(q, k, v, True)[0]


def partial(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Same as the reference, for 16-bit dtypes and head dims of 64 or 128."""
    few = q.shape[1] * -(-len(q) // BLOCK) < MIN_TILES
    return (flash_attention if few else attend_sequences)(q, k, v, causal)


def packed(q: Tensor, k: Tensor, v: Tensor, pack: Packed) -> Tensor:
    """Same as the reference. Sums are in float32. Can be captured in a CUDA graph.

    The dtype is bfloat16 or float16, the head dim 64 or 128. Strides between heads and tokens of q, k and v are
    multiples of 16 bytes.
    """
    return attend_sequences(q, k, v, True, pack.cu_seqlens, pack.cu_seqlens_k)[0]
