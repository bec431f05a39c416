"""Dense attention of one sequence on a GPU, for dtypes and head dims that flash attention does not support."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import gpu_missing

missing = gpu_missing


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve a case."""
    scores = f"with head dim {case.head_dim}, PyTorch holds the scores of all queries and keys in memory"
    return unless(case.head_dim <= 256, scores)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Same as the reference. If the numbers of queries and keys differ, PyTorch makes a mask of queries x keys."""
    bias = causal_lower_right(len(q), len(k))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)[0].transpose(0, 1)
