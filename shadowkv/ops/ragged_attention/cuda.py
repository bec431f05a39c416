"""Causal attention of packed sequences through PyTorch's flash attention (arXiv:2307.08691), in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless


def available() -> bool:
    """Whether there is a CUDA device, and a PyTorch with flash attention."""
    return torch.cuda.is_available() and torch.backends.cuda.is_flash_attention_available()


def supports(case: Case) -> list[str]:
    """Why flash attention cannot serve a case."""
    dim, old = case.head_dim, case.capability is None or case.capability < (8, 0)
    return [
        *unless(case.dtype != torch.float32, f"{case.dtype} is not of 16 bits"),
        *unless(dim % 8 == 0 and dim <= 256, f"head dim {dim} is no multiple of 8 up to 256"),
        *unless(not old, "flash attention needs compute capability 8.0"),
    ]


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """As the reference, in a dtype of 16 bits and head dims that are a multiple of 8 up to 256; the last dimension of
    all is dense. Kv heads are shared by the kernel, not copied."""
    if not len(q):
        return torch.empty_like(q)
    args = q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False
    out: Tensor = torch.ops.aten._flash_attention_forward(*args)[0]
    return out
