"""Causal attention of packed sequences in PyTorch, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shadowkv.ops.causal_attention.reference import causal_attention

NEEDS_LENGTHS = ("cuda",)
"""Devices on which the host has to know how long packed sequences are: a graph would hold those of its capture."""


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int] | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Attention [T, H_q, d] of S packed sequences' newest tokens over k, v [K, H, d], each position up to its own.

    Args:
        cu_seqlens: int32 [S + 1], the start of each sequence's queries, from 0 to T.
        lengths: queries of each sequence: the same for the host, so that it need not wait for ``cu_seqlens``. None
            where only the device knows them, as in a graph.
        cu_seqlens_k: int32 [S + 1], the start of each sequence's keys, from 0 to K or less: its queries are its last
            positions. None where sequences have a query for every key.
    """
    return of_each(causal_attention, q, k, v, cu_seqlens, lengths, cu_seqlens_k)


def of_each(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int] | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor:
    """What ``attend`` makes of q [n, H_q, d], k and v [m, H, d] of each of packed sequences, one after the other:
    [T, H_q, d] of all. Waits for ``cu_seqlens`` where ``lengths`` are not known, and for ``cu_seqlens_k``."""
    lengths = cu_seqlens.diff().tolist() if lengths is None else list(lengths)
    keys = lengths if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
    k, v = k[: sum(keys)], v[: sum(keys)]
    parts = zip(q.split(lengths), k.split(keys), v.split(keys), strict=True)
    attended = [attend(*each) for each in parts if len(each[0])]
    return torch.cat(attended) if attended else torch.empty_like(q)
