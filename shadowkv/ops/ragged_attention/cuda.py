"""Causal attention of packed sequences on Hopper: ``csrc/kernels/attend_blocks_sm90.cuh``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shadowkv.ops.attend_blocks.cuda import available, supports

__all__ = ["available", "ragged_attention", "supports"]


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """As the reference; sums are in float32. Can be captured in a CUDA graph.

    bfloat16 or float16 with a head dim of 64 or 128; heads and tokens of q, k and v lie multiples of 16 bytes apart. A
    single sequence may have more keys than queries, which are then those of its last tokens.
    """
    out = q.new_empty(q.shape)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device)
    scale = q.shape[2] ** -0.5 * math.log2(math.e)
    torch.ops.shadowkv_cuda.attend_packed_sm90(q, k, v, cu_seqlens, scale, taken, out)
    return out
