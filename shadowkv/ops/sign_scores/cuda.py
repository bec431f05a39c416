"""Sign scores with binary tensor cores, ``csrc/kernels/sign_scores.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cuda
from shadowkv.ops.sign_scores import reference

PAGES_OF_A_RUN = 16
"""Most pages that one thread block walks. 63 rows of 61440 tokens take 147 us, 149 with 32 pages, 160 with 8."""

RUNS = 512
"""Blocks to make at least, where there is work for so many: as many as a large GPU holds at a time, twice."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Whether the kernel was built and there is a GPU."""
    if not load_cuda("sign_scores"):
        return False
    torch.library.register_fake("shadowkv_cuda::sign_scores", lambda *_: None)
    return True


def run_pages(batch: int, columns: int) -> int:
    """Pages of a block's run: a multiple of 4."""
    return max(4, min(PAGES_OF_A_RUN, -(-batch * columns // (4 * RUNS)) * 4))


def sign_scores(q: Tensor, signs: Tensor, scale: Tensor, pages: Tensor, num_pages: Tensor, rotation: Tensor) -> Tensor:
    """As the reference, but for queries whose rotation rounds the other way: those differ in a whole number.

    In CUDA for a head dim that is a multiple of 8 up to 128, or from 200 to 256, up to 8 query heads a kv head and
    queries of float32, bfloat16 or float16; otherwise by the reference. Pages past the valid ones are not read, nor are
    their names. Two launches: one rotates and packs the queries, the other begins to copy pages meanwhile.

    On an H200, head dim 128, 8 kv heads of 4 query heads: 63 rows of 61440 tokens in 148 us, 3.8 TB/s; one in 8 us.
    """
    batch, query_heads, dim = q.shape
    heads, row_bytes = signs.shape[1], signs.shape[3]
    if dim % 8 or row_bytes not in (8, 16, 32) or query_heads > 8 * heads or q.dtype not in DTYPES:
        return reference.sign_scores(q, signs, scale, pages, num_pages, rotation)
    columns = pages.shape[1]
    packed = torch.empty(batch, query_heads, 2 * row_bytes + 2, dtype=torch.int32, device=q.device)
    scores = torch.empty(batch, heads, 64 // reference.RUN * columns, dtype=torch.float16, device=q.device)
    torch.ops.shadowkv_cuda.sign_scores(
        q.contiguous(), signs, scale, pages, num_pages, rotation, run_pages(batch, columns), packed, scores
    )
    return scores
