"""Selection of blocks on Hopper. ``csrc/kernels/score_blocks_sm90/`` scores the blocks that a tile may leave out, and
Triton does the rest."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless, unless_one_of
from shadowkv.ops.extension import HOPPER, cuda_missing
from shadowkv.ops.select_blocks.reference import LOCAL_BLOCKS, SAMPLED, SINK_BLOCKS, Blocks
from shadowkv.ops.select_blocks.triton import draw_blocks, sample_queries, score_attended, score_buffer

DIMS = (64, 128)
"""Head dims that the kernel supports."""
DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 128
"""Maximum number of sampled queries per tile and kv head that the kernel supports."""


missing = partial(cuda_missing, "score_blocks_sm90", "score_blocks_sm90", capability=HOPPER)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return [
        *unless_one_of(case.dtype, DTYPES),
        *unless_one_of(case.head_dim, DIMS, "head dim"),
        *unless(case.group * SAMPLED <= MAX_ROWS, f"group {case.group} is above {MAX_ROWS // SAMPLED}"),
    ]


def select_blocks(q: Tensor, k: Tensor, error: float, whole: int = 0, seed: int = 0) -> Blocks:
    """Same as ``triton.select_blocks``, but a block's share of the softmax has a relative error of up to
    1e-4. Can be captured in a CUDA graph.

    The dtype is bfloat16 or float16, the head dim 64 or 128, with up to 16 query heads per kv head. Strides between
    heads and tokens of q and k are multiples of 16 bytes.
    """
    scores, sampled = score_buffer(q, k), sample_queries(q)
    score_blocks(q, k, sampled, scores)
    return draw_blocks(scores, score_attended(q, k, sampled), q, k, error, whole, seed)


def score_blocks(q: Tensor, k: Tensor, sampled: Tensor, scores: Tensor) -> None:
    """Same as ``triton.score_blocks``. Scores of padding rows are not written, and neither are scores of the first
    blocks, which every tile attends to.

    ``sampled`` is read on the device and not checked.
    """
    scale = q.shape[2] ** -0.5 * math.log2(math.e)
    torch.ops.shadowkv_cuda.score_blocks_sm90(q, k, sampled, scale, SINK_BLOCKS, LOCAL_BLOCKS, scores)
