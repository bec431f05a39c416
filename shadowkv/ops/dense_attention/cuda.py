"""Dense attention of one sequence on a GPU by PyTorch's flash attention."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import gpu_missing

missing = gpu_missing


def supports(case: Case) -> list[str]:
    """Why flash attention cannot serve a case."""
    dim = case.head_dim
    dims = unless(dim % 8 == 0 and dim <= 256, f"head dim {dim} is no multiple of 8 up to 256")
    return unless(case.dtype != torch.float32, f"{case.dtype} is not of 16 bits") + dims


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Same as the reference, for 16-bit dtypes and head dims that are multiples of 8 up to 256."""
    return flash_attention(q, k, v, True)[0]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes attention of q [n, H_q, d] over k, v [m, H, d]. Returns the result [n, H_q, d] and its log-sum-exp,
    float32 [n, H_q]. The dtype has 16 bits, and the head dim is a multiple of 8 up to 256. If ``causal``, the
    queries are the last n of m positions."""
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal)
    return out[0].transpose(0, 1), lse[0].T


partial = flash_attention
