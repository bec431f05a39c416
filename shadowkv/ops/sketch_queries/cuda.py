"""Queries of a key sketch in one launch, ``csrc/kernels/sketch_queries.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cuda
from shadowkv.ops.sign_scores.reference import plane_bytes
from shadowkv.ops.sketch_queries import reference
from shadowkv.ops.sketch_queries.reference import PLANES, SketchQueries

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Whether the kernel was built and there is a GPU."""
    if not load_cuda("sketch_queries"):
        return False
    torch.library.register_fake("shadowkv_cuda::sketch_queries", lambda *_: None)
    return True


def sketch_queries(q: Tensor, maps: Tensor, slots: Tensor) -> SketchQueries:
    """As the reference, but for coordinates near the middle of two whole numbers: those may become the other one.

    In CUDA for a head dim that is a multiple of 8 up to 128, or from 200 to 256, queries of float32, bfloat16 or
    float16, and up to 8 query heads a kv head; otherwise by the reference. ``slots`` and ``maps`` are read while the
    launch before is running.
    """
    batch, heads, dim = q.shape
    size = plane_bytes(dim)
    if dim % 8 or size not in (8, 16, 32) or q.dtype not in DTYPES or heads > 8 * maps.shape[1]:
        return reference.sketch_queries(q, maps, slots)
    queries = SketchQueries(
        torch.empty(batch, heads, 8, size, dtype=torch.int8, device=q.device),
        torch.empty(batch, heads, dtype=torch.float32, device=q.device),
        torch.empty(batch, heads, dtype=torch.int32, device=q.device),
        torch.empty(batch, heads, PLANES, size, dtype=torch.uint8, device=q.device),
        torch.empty(batch, heads, dtype=torch.int32, device=q.device),
        torch.empty(batch, heads, dtype=torch.float32, device=q.device),
    )
    outputs = (queries.whole, queries.unit, queries.sum, queries.planes, queries.plane_sum, queries.length)
    torch.ops.shadowkv_cuda.sketch_queries(q.contiguous(), maps, slots, *outputs)
    return queries
