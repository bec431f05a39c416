"""Attention with its log-sum-exp on a GPU, without scores in memory: our kernel on a Hopper
(``csrc/kernels/attend_blocks_sm90/``), PyTorch's flash attention elsewhere.

Ours takes a tile of 128 queries of a head on each multiprocessor; flash attention splits the keys where there are few
queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.attend_blocks import cuda as hopper
from shadowkv.ops.case import Case, unless
from shadowkv.ops.select_blocks.reference import BLOCK

FEWEST_TILES = 64
"""Fewest tiles, over all query heads, for which our kernel is the faster one: they keep about half of a Hopper's
multiprocessors busy."""


def available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def supports(case: Case) -> list[str]:
    """Why flash attention cannot serve a case."""
    dim = case.head_dim
    dims = unless(dim % 8 == 0 and dim <= 256, f"head dim {dim} is no multiple of 8 up to 256")
    return unless(case.dtype != torch.float32, f"{case.dtype} is not of 16 bits") + dims


def is_ours(q: Tensor) -> bool:
    """Whether our kernel serves queries [n, H_q, d]."""
    tiles = q.shape[1] * -(-len(q) // BLOCK)
    return tiles >= FEWEST_TILES and q.dtype in hopper.DTYPES and q.shape[2] in hopper.DIMS and hopper.available()


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Same as the reference, for 16-bit dtypes and head dims that are multiples of 8 up to 256; the last dimension of
    every tensor is dense."""
    if is_ours(q):
        return hopper.attend_sequences(q, k.transpose(0, 1), v.transpose(0, 1), causal)
    queries = q.transpose(0, 1)[None]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, k[None], v[None], 0.0, causal)
    return out[0].transpose(0, 1), lse[0].T
