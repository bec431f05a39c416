"""Paged decode attention in C++: pages are read where they lie, ``csrc/cpu/paged_attention.h``."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cpu as available
from shadowkv.ops.paged_attention import reference

__all__ = ["available", "paged_attention"]


def paged_attention(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference. float32 and bfloat16 in C++, other dtypes by the reference.

    Scores and weights are float32 also for bfloat16. Results are the same bits on any number of threads. A row
    without tokens gives 0 and -inf.
    """
    if q.dtype not in (torch.float32, torch.bfloat16):
        return reference.paged_attention(q, k, v, pages, counts)
    return torch.ops.shadowkv.paged_attention(q, k, v, pages, counts)
