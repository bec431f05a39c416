"""Queries for a key sketch in one CUDA kernel (``csrc/kernels/sketch_queries/``)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import cuda_missing
from shadowkv.ops.sketch_queries.reference import PLANES, SketchQueries, plane_bytes

PLANE_BYTES, GROUP = (8, 16, 32, 64), 16
"""Supported plane sizes in bytes, and maximum number of query heads per kv head. Head dims up to 128, from 200 to 256,
and from 456 to 512 have these sizes."""

missing = partial(cuda_missing, "sketch_queries", "sketch_queries")


def supports(case: Case) -> list[str]:
    """Why this kernel and those of ``sign_scores`` and ``select_by_sketch`` cannot serve a case."""
    size = f"head dim {case.head_dim} is not in 8-128, 200-256 or 456-512"
    return [
        *unless(plane_bytes(case.head_dim) in PLANE_BYTES, size),
        *unless(case.group <= GROUP, f"{case.group} query heads per kv head are more than {GROUP}"),
    ]


def sketch_queries(q: Tensor, maps: Tensor, states: Tensor) -> SketchQueries:
    """Same as the reference, except that coordinates near the middle between two whole numbers may be rounded
    differently.

    The head dim is a multiple of 8 up to 128, from 200 to 256, or from 456 to 512, with up to 16 query heads per kv
    head. Queries are float32, bfloat16 or float16. ``states`` and ``maps`` may be read while the previous kernel on the
    stream is still running, so that previous kernel must not write them.
    """
    batch, heads, dim = q.shape
    size = plane_bytes(dim)
    queries = SketchQueries(
        torch.empty(batch, heads, 8, size, dtype=torch.int8, device=q.device),
        torch.empty(batch, heads, dtype=torch.float32, device=q.device),
        torch.empty(batch, heads, dtype=torch.int32, device=q.device),
        torch.empty(batch, heads, PLANES, size, dtype=torch.uint8, device=q.device),
        torch.empty(batch, heads, dtype=torch.int32, device=q.device),
        torch.empty(batch, heads, dtype=torch.float32, device=q.device),
    )
    outputs = (queries.whole, queries.unit, queries.sum, queries.planes, queries.plane_sum, queries.length)
    torch.ops.shadowkv_cuda.sketch_queries(q.contiguous(), maps, states, *outputs)
    return queries
