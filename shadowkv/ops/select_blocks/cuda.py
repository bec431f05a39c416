"""Selection of blocks with scores by ``csrc/kernels/score_blocks_sm90.cuh``, for Hopper, and the rest by Triton."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import load_cuda
from shadowkv.ops.select_blocks import triton
from shadowkv.ops.select_blocks.reference import LOCAL_BLOCKS, SAMPLED, SINK_BLOCKS, KeyBlocks
from shadowkv.ops.select_blocks.triton import Asked

DIMS = (64, 128)
"""Head dims that the kernel is made for."""
MOST_ROWS = 128
"""Sampled queries of a tile and a kv head that it takes."""


@cache
def available() -> bool:
    """Whether the kernel was built and the CUDA device is a Hopper."""
    return load_cuda("score_blocks_sm90", "score_blocks_sm90") and torch.cuda.get_device_capability() == (9, 0)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return [
        *unless(case.head_dim in DIMS, f"head dim {case.head_dim} is not 64 or 128"),
        *unless(case.group * SAMPLED <= MOST_ROWS, f"group {case.group} is above {MOST_ROWS // SAMPLED}"),
        *triton.supports(case),
    ]


def select_blocks(
    q: Tensor, keys: KeyBlocks, m: int, share: float, most: float, whole: int = 0
) -> tuple[Tensor, Tensor]:
    """As the reference; products are exact, and a block's share is off by 6 % of it at the most, most by less than 1.

    A head dim of 64 or 128, up to 16 query heads of a kv head. Can be captured in a CUDA graph.
    """
    asked = triton.code_queries(q, triton.sample_queries(q), keys.codes.shape[1])
    scores = triton.score_buffer(asked, m)
    score_blocks(asked, keys, len(q), m, scores)
    return triton.choose_blocks(scores, q, m, share, most, whole)


def score_blocks(asked: Asked, keys: KeyBlocks, n: int, m: int, scores: Tensor) -> None:
    """As ``triton.score_blocks``; padding rows and the first blocks, about which there is no choice, are not
    written."""
    scale = asked.dim**-0.5 * math.log2(math.e)
    rows = asked.codes.flatten(0, 2).unsqueeze(1)
    torch.ops.shadowkv_cuda.score_blocks_sm90(
        rows, asked.steps, asked.dim, asked.group, keys.codes, keys.steps, n, m, scale, SINK_BLOCKS, LOCAL_BLOCKS,
        scores,
    )  # fmt: skip
