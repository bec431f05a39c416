"""Two-level selection in one pass over the kept runs, ``csrc/kernels/select_by_sketch.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cuda
from shadowkv.ops.select_by_sketch import reference
from shadowkv.ops.sign_scores.reference import RUN
from shadowkv.ops.sketch_queries.reference import SketchQueries

OTHER_BYTES = 84 * 1024
"""Shared memory that the kernel uses besides a row's values, at most."""


@cache
def available() -> bool:
    """Whether the kernel was built and there is a GPU."""
    if not load_cuda("select_by_sketch"):
        return False
    torch.library.register_fake("shadowkv_cuda::select_by_sketch", lambda *_: None)
    return True


@cache
def _shared_bytes(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin - OTHER_BYTES  # type: ignore[attr-defined]  # stub is behind


def region_bytes(columns: int, chunk: int, k: int) -> int:
    """Bytes that a row needs: values of its runs or kept chunks, the kept runs, and two bit sets."""
    runs = 64 // RUN * columns
    keep = min(runs, max(-(-runs // reference.KEPT_SHARE), -(-k * chunk * reference.KEPT_OVER_BUDGET // RUN)))
    most = -(-max(runs, keep * (RUN // chunk)) // 32) * 32
    return -(-(2 * most + -(-8 * keep // 16) * 16 + most // 4) // 16) * 16


def select_by_sketch(
    queries: SketchQueries,
    coarse: Tensor,
    signs: Tensor,
    rest: Tensor,
    scale: Tensor,
    excluded: Tensor,
    pages: Tensor,
    num_pages: Tensor,
    budget: Tensor,
    k: int,
) -> Tensor:
    """As the reference; scores are compared as float16 numbers.

    In CUDA for a head dim that is a multiple of 8 up to 128, or from 200 to 256, and up to 8 query heads a kv head;
    otherwise by the reference. Rows of more than about 350,000 tokens are selected in global memory: slower, as they no
    longer fit in a multiprocessor's own.
    """
    batch, query_heads, _, plane = queries.whole.shape
    heads, chunks, columns, device = signs.shape[1], excluded.shape[-1], pages.shape[1], signs.device
    fields = (coarse, signs, rest, scale, excluded, pages, num_pages, budget)
    if plane not in (8, 16, 32) or query_heads > 8 * heads or chunks not in (8, 16, 32, 64):
        return reference.select_by_sketch(queries, *fields, k)
    region = region_bytes(columns, 64 // chunks, k)
    outside = region if region > _shared_bytes(device) else 0
    workspace = torch.empty(batch * heads, outside, dtype=torch.uint8, device=device)
    selected = torch.empty(batch, heads, k, dtype=torch.int64, device=device)
    torch.ops.shadowkv_cuda.select_by_sketch(queries.whole, queries.unit, queries.sum, *fields, workspace, selected)
    return selected
