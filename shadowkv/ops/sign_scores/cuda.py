"""Sign scores with binary tensor cores (``csrc/kernels/sign_scores/``)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.extension import cuda_missing
from shadowkv.ops.page import PAGE
from shadowkv.ops.sign_scores.reference import RUN
from shadowkv.ops.sketch_queries.cuda import supports
from shadowkv.ops.sketch_queries.reference import SketchQueries

__all__ = ["block_pages", "missing", "sign_scores", "supports"]

MAX_BLOCK_PAGES = 16
"""Maximum number of pages that one thread block scores. 63 rows of 61440 tokens take 134 us on an H200, and 136 us with
32 pages."""

MIN_BLOCKS = 512
"""A thread block takes more than 4 pages only if there would otherwise be more thread blocks than this. This is twice
the number of blocks that a large GPU holds at a time."""

missing = partial(cuda_missing, "sign_scores", "sign_scores")


def block_pages(batch: int, columns: int) -> int:
    """Number of pages that a thread block scores, a multiple of 4."""
    return max(4, min(MAX_BLOCK_PAGES, -(-batch * columns // (4 * MIN_BLOCKS)) * 4))


def sign_scores(queries: SketchQueries, signs: Tensor, scale: Tensor, pages: Tensor, num_pages: Tensor) -> Tensor:
    """Same as the reference, bit for bit.

    The head dim is a multiple of 8 up to 128, from 200 to 256, or from 456 to 512, with up to 16 query heads per kv
    head. Page ids from ``num_pages`` on are not read. The kernel starts to copy pages while the previous kernel on the
    stream is still running. That previous kernel may write ``queries``, but none of the other arguments.

    63 rows of 61440 tokens with head dim 128 and 8 kv heads of 4 query heads take 134 us on an H200, including
    ``sketch_queries``. This is 4.2 TB/s.
    """
    batch, columns = pages.shape
    scores = torch.empty(batch, signs.shape[1], PAGE // RUN * columns, dtype=torch.float16, device=signs.device)
    places = (pages, num_pages, block_pages(batch, columns))
    torch.ops.shadowkv_cuda.sign_scores(queries.planes, queries.unit, queries.plane_sum, signs, scale, *places, scores)
    return scores
