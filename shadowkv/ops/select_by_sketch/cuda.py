"""Selection in two levels in three CUDA kernels (``csrc/kernels/select_by_sketch/``)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import cuda_missing
from shadowkv.ops.page import PAGE
from shadowkv.ops.sampling import Sampling
from shadowkv.ops.select_by_sketch import reference
from shadowkv.ops.sign_scores.reference import RUN
from shadowkv.ops.sketch_queries import cuda as sketch_queries
from shadowkv.ops.sketch_queries.reference import SketchQueries

COUNTS_BYTES = 12 * 1024
"""Maximum number of bytes of shared memory that the kernels use besides those that ``supports`` computes."""

missing = partial(cuda_missing, "select_by_sketch", "select_by_sketch")


def supports(case: Case) -> list[str]:
    """Why the kernels cannot serve a case: one thread block must be able to select from all runs of the longest
    context.

    An H200 cannot do this for contexts of more than 3.5 million tokens, or, with ``chunk=1``, if more than 55,040 runs
    are kept (``reference.most_kept``).
    """
    groups = (case.block_memory - COUNTS_BYTES) // 4  # groups of 8 values take 4 bytes each
    kept = reference.most_kept(PAGE // RUN * case.max_pages, case.max_selected, case.chunk)
    needed = max(case.max_pages, -(-kept // case.chunk))
    reason = f"{case.block_memory} bytes of shared memory are too few to select from {PAGE * case.max_pages} tokens"
    return sketch_queries.supports(case) + unless(needed <= groups, reason)


def region_bytes(columns: int, chunk: int, k: int) -> int:
    """Bytes of workspace per row and kv head. The kernels pass data to each other through the workspace: the kept runs,
    their weights, the scores of their chunks, and 16 bytes more."""
    keep = reference.most_kept(PAGE // RUN * columns, k, chunk)
    return sum(-(-size // 16) * 16 for size in (2 * keep * (RUN // chunk), 8 * keep, 4 * keep)) + 16


def select_by_sketch(
    queries: SketchQueries,
    coarse: Tensor,
    signs: Tensor,
    rest: Tensor,
    scale: Tensor,
    pages: Tensor,
    num_pages: Tensor,
    budget: Tensor,
    chunk: int,
    k: int,
    sampling: Sampling | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Same as the reference. Scores are compared in float16.

    The head dim is a multiple of 8 up to 128, from 200 to 256, or from 456 to 512, with up to 16 query heads per kv
    head.
    """
    (batch, columns), heads, device = pages.shape, signs.shape[1], signs.device
    if not columns:
        none = torch.full((batch, heads, k), -1, device=device)
        return none, None if sampling is None else none.float()
    fields = (coarse, signs, rest, scale, pages, num_pages, budget, chunk)
    workspace = torch.empty(batch * heads, region_bytes(columns, chunk, k), dtype=torch.uint8, device=device)
    selected = torch.empty(batch, heads, k, dtype=torch.int64, device=device)
    sampled = (None, None) if sampling is None else (sampling.counts, sampling.seeds)
    log_weight = None if sampling is None else torch.empty(batch, heads, k, dtype=torch.float32, device=device)
    torch.ops.shadowkv_cuda.select_by_sketch(
        queries.whole,
        queries.unit,
        queries.sum,
        *fields,
        *sampled,
        queries.length,
        reference.RUN_SHARPNESS,
        reference.CHUNK_SHARPNESS,
        layer,
        workspace,
        selected,
        log_weight,
    )
    return selected, log_weight
