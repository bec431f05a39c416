"""Sketch scores with int8 tensor cores at the speed of memory, ``csrc/kernels/sketch_scores.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cuda
from shadowkv.ops.sketch_scores import reference

PAGES_OF_A_RUN = 32
"""Most pages that one thread block walks: a lane of each warp holds the name of one."""

RUNS = 512
"""Blocks to make at least, where there is work for so many: as many as a large GPU holds at a time, twice."""


@cache
def available() -> bool:
    """Whether the kernel was built and there is a GPU."""
    if not load_cuda("sketch_scores"):
        return False
    torch.library.register_fake("shadowkv_cuda::sketch_scores", lambda *_: None)
    return True


def run_pages(batch: int, columns: int) -> int:
    """Pages of a block's run: an even number."""
    return max(2, min(PAGES_OF_A_RUN, -(-batch * columns // (2 * RUNS)) * 2))


def sketch_scores(
    q: Tensor,
    codes: Tensor,
    scale: Tensor,
    excluded: Tensor,
    pages: Tensor,
    num_chunks: Tensor,
    rotation: Tensor,
) -> tuple[Tensor, Tensor]:
    """As the reference, with T = the runs of pages that a row is cut into.

    In CUDA for a head dim that is a multiple of 16 up to 128, or a multiple of 16 from 208 to 256, and up to 8 query
    heads a kv head; otherwise by the reference. Pages past the valid chunks are not read, nor are their names.
    """
    batch, query_heads, dim = q.shape
    heads, chunks = codes.shape[1:3]
    if dim % 16 or codes.shape[-1] not in (16, 32, 64) or query_heads > 8 * heads:
        return reference.sketch_scores(q, codes, scale, excluded, pages, num_chunks, rotation)
    columns = pages.shape[1]
    run = run_pages(batch, columns)
    group = query_heads // heads
    logits = torch.empty(batch, heads, group, columns * chunks, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, group, -(-columns // run), dtype=torch.float32, device=q.device)
    rotated = q.float() @ rotation
    torch.ops.shadowkv_cuda.sketch_scores(rotated, codes, scale, excluded, pages, num_chunks, run, logits, lse)
    return logits, lse
