"""Attention with its log-sum-exp on a GPU, without scores in memory: PyTorch's flash attention, and on a Hopper our
kernel (``csrc/kernels/attend_blocks_sm90/``) wherever it is the faster one.

Ours takes a tile of 128 queries of a head on each multiprocessor; flash attention splits the keys where there are few
queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.attend_blocks.cuda_sm90 import attend_sequences
from shadowkv.ops.select_blocks.reference import BLOCK

MIN_TILES = 64
"""Fewest tiles, over all query heads, for which our kernel is the faster one: they keep about half of a Hopper's
multiprocessors busy."""


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Same as ``block_attention``, for 16-bit dtypes and head dims that are multiples of 8 up to 256."""
    queries = q.transpose(0, 1)[None]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, k[None], v[None], 0.0, causal)
    return out[0].transpose(0, 1), lse[0].T


def attend_by_size(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Same as ``block_attention`` on a Hopper, for 16-bit dtypes and head dims of 64 or 128: by our kernel from
    ``MIN_TILES`` tiles of queries on, and by flash attention below."""
    if q.shape[1] * -(-len(q) // BLOCK) < MIN_TILES:
        return flash_attention(q, k, v, causal)
    return attend_sequences(q, k.transpose(0, 1), v.transpose(0, 1), causal)
