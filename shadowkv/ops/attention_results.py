"""Allocates the results of attention for several GPU backends."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend_to_nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the attention of queries [B, H_q, d] to no tokens: zeros like ``q``, and the log-sum-exp -inf, float32
    [B, H_q]."""
    return torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)


def result_and_parts(q: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates the results of attention of queries [B, H_q, d], for kernels that divide a row into ``parts``.

    Returns:
        Four uninitialised tensors: out like ``q``, and its log-sum-exp [B, H_q]; then, for the parts, out [B, H_q,
        parts, d] and the log-sum-exp [B, H_q, parts]. All but the first are float32.
    """
    batch, heads, dim = q.shape
    lse = q.new_empty(batch, heads, dtype=torch.float32)
    return torch.empty_like(q), lse, lse.new_empty(batch, heads, parts, dim), lse.new_empty(batch, heads, parts)


def merge_parts(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the attention of parts, ``out`` float32 [B, H, parts, G, d] and ``lse`` float32 [B, H, parts, G], for G
    query heads per kv head. Returns the attention float32 [B, H, G, d] and its log-sum-exps [B, H, G]: 0 and -inf where
    no part has tokens."""
    total = lse.logsumexp(2)
    weights = (lse - total.masked_fill(total == -math.inf, 0).unsqueeze(2)).exp()
    return (out * weights.unsqueeze(-1)).sum(2), total
