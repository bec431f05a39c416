"""Two-level selection in three launches, ``csrc/kernels/select_by_sketch.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.extension import block_memory, load_cuda
from shadowkv.ops.select_by_sketch import reference
from shadowkv.ops.select_by_sketch.draws import Draws
from shadowkv.ops.sign_scores.reference import RUN
from shadowkv.ops.sketch_queries.reference import SketchQueries

COUNTS_BYTES = 12 * 1024
"""Shared memory that the kernels use besides those, at most."""


@cache
def available() -> bool:
    """Whether the kernel was built and there is a GPU."""
    if not load_cuda("select_by_sketch"):
        return False
    torch.library.register_fake("shadowkv_cuda::select_by_sketch", lambda *_: None)
    return True


@cache
def most_groups(device: torch.device) -> int:
    """Groups of 8 values from which a thread block can select: it keeps 4 bytes of each."""
    return (block_memory(device) - COUNTS_BYTES) // 4


def region_bytes(columns: int, chunk: int, k: int) -> int:
    """Bytes that a row leaves between launches: its kept runs and what they weigh, scores of their chunks, and 16."""
    keep = reference.most_kept(64 // RUN * columns, k, chunk)
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
    draws: Draws | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """As the reference; scores are compared as float16 numbers.

    In CUDA for a head dim that is a multiple of 8 up to 128, or from 200 to 256, and up to 8 query heads a kv head;
    otherwise by the reference, as where there are more runs or chunks to choose from than fit in shared memory: on an
    H200 contexts of 3.5 million tokens, or half a million to choose from.
    """
    batch, query_heads, _, plane = queries.whole.shape
    heads, columns, device = signs.shape[1], pages.shape[1], signs.device
    fields = (coarse, signs, rest, scale, pages, num_pages, budget, chunk)
    region = region_bytes(columns, chunk, k)
    fits = 0 < columns <= most_groups(device) and region // 16 <= most_groups(device)
    if plane not in (8, 16, 32) or query_heads > 8 * heads or chunk not in (1, 2, 4, 8) or not fits:
        return reference.select_by_sketch(queries, *fields, k, draws, layer)
    workspace = torch.empty(batch * heads, region, dtype=torch.uint8, device=device)
    selected = torch.empty(batch, heads, k, dtype=torch.int64, device=device)
    drawn = (None, None) if draws is None else (draws.counts, draws.seeds)
    log_weight = None if draws is None else torch.empty(batch, heads, k, dtype=torch.float32, device=device)
    torch.ops.shadowkv_cuda.select_by_sketch(
        queries.whole,
        queries.unit,
        queries.sum,
        *fields,
        *drawn,
        queries.length,
        reference.RUN_SHARPNESS,
        reference.CHUNK_SHARPNESS,
        layer,
        workspace,
        selected,
        log_weight,
    )
    return selected, log_weight
