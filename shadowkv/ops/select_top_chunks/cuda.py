"""Ragged top-k by radix selection with one thread block per row (``csrc/kernels/select_top_chunks/``)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import block_memory, cuda_missing

STATIC_BYTES = 20 * 1024
"""Bytes of shared memory that the kernel uses besides the sort keys of a row."""

GROUP = 32
"""Maximum number of query heads per kv head."""

missing = partial(cuda_missing, "select_top_chunks", "select_top_chunks")


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    group = unless(case.group <= GROUP, f"{case.group} query heads per kv head are more than {GROUP}")
    return group + unless(
        not case.mass, "the policy stops at a share of the softmax (mass), which the CUDA kernel does not support"
    )


def select_top_chunks(logits: Tensor, lse: Tensor, budget: Tensor, k: int, mass: float | None = None) -> Tensor:
    """Same as the reference without ``mass``. Among equal shares, the first chunks are selected.

    Rows of more than about 49,000 chunks do not fit in shared memory. They are ranked in global memory, which is
    slower.
    """
    (batch, heads), chunks = logits.shape[:2], logits.shape[3]
    if mass is not None:
        raise ValueError(f"select_top_chunks in CUDA does not support mass={mass}, only a number of chunks")
    if not chunks:
        return torch.full((batch, heads, k), -1, device=logits.device)
    words = -(-chunks // 32) * 34  # a 32-bit key per chunk and two bit sets
    outside = words if 4 * words > block_memory(logits.device) - STATIC_BYTES else 0
    workspace = torch.empty(batch * heads, outside, dtype=torch.int32, device=logits.device)
    selected = torch.empty(batch, heads, k, dtype=torch.int64, device=logits.device)
    torch.ops.shadowkv_cuda.select_top_chunks(logits.contiguous(), lse.contiguous(), budget, workspace, selected)
    return selected
