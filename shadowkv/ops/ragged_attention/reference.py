"""Causal attention of packed sequences in PyTorch, one after the other."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from shadowkv.ops.causal_attention.reference import causal_attention


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Attention [T, H_q, d] of S packed sequences over their own k, v [T, H, d], each position up to its own.

    Args:
        cu_seqlens: int32 [S + 1], the start of each sequence, from 0 to T; each has at least one token.
        longest: length of the longest sequence, known to the host so that no kernel waits for ``cu_seqlens``.
    """
    parts = [causal_attention(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(cu_seqlens.tolist())]
    return torch.cat(parts) if parts else torch.empty_like(q)
