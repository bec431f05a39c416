"""Dense attention of one sequence on a GPU by PyTorch's flash attention."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.dense_attention.flash import flash_attention
from shadowkv.ops.extension import gpu_missing

missing = gpu_missing
partial = flash_attention


def supports(case: Case) -> list[str]:
    """Why flash attention cannot serve a case."""
    dim = case.head_dim
    dims = unless(dim % 8 == 0 and dim <= 256, f"head dim {dim} is no multiple of 8 up to 256")
    return unless(case.dtype != torch.float32, f"{case.dtype} is not of 16 bits") + dims


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Same as the reference, for 16-bit dtypes and head dims that are multiples of 8 up to 256."""
    return flash_attention(q, k, v, True)[0]
