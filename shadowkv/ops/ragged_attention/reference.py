"""Causal attention of packed sequences in PyTorch, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shadowkv.ops.causal_attention.reference import causal_attention


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int] | None = None
) -> Tensor:
    """Attention [T, H_q, d] of S packed sequences over their own k, v [T, H, d], each position up to its own.

    Args:
        cu_seqlens: int32 [S + 1], the start of each sequence, from 0 to T.
        lengths: tokens of each sequence: the same for the host, so that it need not wait for ``cu_seqlens``. None where
            only the device knows them, as in a graph.
    """
    return of_each(causal_attention, q, k, v, cu_seqlens, lengths)


def of_each(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int] | None,
) -> Tensor:
    """What ``attend`` makes of q [n, H_q, d], k and v [n, H, d] of each of packed sequences, one after the other:
    [T, H_q, d] of all. Waits for ``cu_seqlens`` where ``lengths`` are not known."""
    lengths = [length for length in cu_seqlens.diff().tolist() if length] if lengths is None else lengths
    parts = [attend(*each) for each in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)]
    return torch.cat(parts) if parts else torch.empty_like(q)
