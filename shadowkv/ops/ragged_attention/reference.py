"""Causal attention of packed sequences in PyTorch, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shadowkv.ops.causal_attention.reference import causal_attention


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention [T, H_q, d] of S packed sequences over their own k, v [T, H, d], each position up to its own.

    Args:
        cu_seqlens: int32 [S + 1], the start of each sequence, from 0 to T; each has at least one token.
        lengths: tokens of each sequence: the same for the host, so that it need not wait for ``cu_seqlens``.
    """
    return of_each(causal_attention, q, k, v, lengths)


def of_each(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """What ``attend`` makes of q [n, H_q, d], k and v [n, H, d] of each of packed sequences, one after the other:
    [T, H_q, d] of all."""
    parts = [attend(*each) for each in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)]
    return torch.cat(parts) if parts else torch.empty_like(q)
