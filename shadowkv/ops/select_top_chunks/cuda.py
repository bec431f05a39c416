"""Ragged top-k by radix selection, one thread block a row, ``csrc/kernels/select_top_chunks.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cuda
from shadowkv.ops.select_top_chunks import reference

STATIC_BYTES = 20 * 1024
"""Shared memory that the kernel uses besides a row's keys."""

GROUP = 32
"""Most query heads of a kv head."""


@cache
def available() -> bool:
    """Whether the kernel was built and there is a GPU."""
    if not load_cuda("select_top_chunks"):
        return False
    torch.library.register_fake("shadowkv_cuda::select_top_chunks", lambda *_: None)
    return True


@cache
def _shared_bytes(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin - STATIC_BYTES  # type: ignore[attr-defined]  # stub is behind


def select_top_chunks(logits: Tensor, lse: Tensor, budget: Tensor, k: int, mass: float | None = None) -> Tensor:
    """As the reference, in ascending order; of equal shares the first ones.

    float32 logits without ``mass`` in CUDA, others there.

    Rows of more than about 49,000 chunks are ranked in global memory: slower, as they no longer fit in a
    multiprocessor's own.
    """
    batch, heads, group, chunks = logits.shape
    if logits.dtype != torch.float32 or group > GROUP or not chunks or mass is not None:
        return reference.select_top_chunks(logits, lse, budget, k, mass)
    words = -(-chunks // 32) * 34  # a key of 32 bits a chunk and two bit sets
    outside = words if 4 * words > _shared_bytes(logits.device) else 0
    workspace = torch.empty(batch * heads, outside, dtype=torch.int32, device=logits.device)
    selected = torch.empty(batch, heads, k, dtype=torch.int64, device=logits.device)
    torch.ops.shadowkv_cuda.select_top_chunks(logits.contiguous(), lse.contiguous(), budget, workspace, selected)
    return selected
