"""Selection of blocks with scores by ``csrc/kernels/score_blocks_sm90.cuh``, for Hopper, and the rest by Triton."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import load_cuda
from shadowkv.ops.select_blocks.reference import LOCAL_BLOCKS, SAMPLED, SINK_BLOCKS
from shadowkv.ops.select_blocks.triton import choose_blocks, sample_queries, score_buffer

DIMS = (64, 128)
"""Head dims that the kernel is made for."""
DTYPES = (torch.bfloat16, torch.float16)
MOST_ROWS = 128
"""Sampled queries of a tile and a kv head that it takes."""


@cache
def available() -> bool:
    """Whether the kernel was built and the CUDA device is a Hopper."""
    return load_cuda("score_blocks_sm90", "score_blocks_sm90") and torch.cuda.get_device_capability() == (9, 0)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return [
        *unless(case.dtype in DTYPES, f"{case.dtype} is not bfloat16 or float16"),
        *unless(case.head_dim in DIMS, f"head dim {case.head_dim} is not 64 or 128"),
        *unless(case.group * SAMPLED <= MOST_ROWS, f"group {case.group} is above {MOST_ROWS // SAMPLED}"),
    ]


def select_blocks(q: Tensor, k: Tensor, share: float, most: float, whole: int = 0) -> tuple[Tensor, Tensor]:
    """As the reference; products are summed in float32, and a block's share is off by 1e-4 of it at the most.

    bfloat16 or float16 with a head dim of 64 or 128, up to 16 query heads of a kv head; heads and tokens of q and k lie
    multiples of 16 bytes apart. Can be captured in a CUDA graph.
    """
    scores = score_buffer(q, k)
    score_blocks(q, k, sample_queries(q), scores)
    return choose_blocks(scores, q, k, share, most, whole)


def score_blocks(q: Tensor, k: Tensor, sampled: Tensor, scores: Tensor) -> None:
    """As ``triton.score_blocks``; padding rows and the first blocks, about which there is no choice, are not written.

    ``sampled``, rows of q, are read on the device and are not checked.
    """
    scale = q.shape[2] ** -0.5 * math.log2(math.e)
    torch.ops.shadowkv_cuda.score_blocks_sm90(q, k, sampled, scale, SINK_BLOCKS, LOCAL_BLOCKS, scores)
