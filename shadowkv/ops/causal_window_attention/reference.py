"""Causal prefill attention within a window, through PyTorch's fused kernels with a mask."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from shadowkv.ops.ragged_attention.reference import of_each

NEEDS_LENGTHS = ("cuda",)

QUERIES_AT_ONCE = 256
"""Queries that attend at a time: their keys are few more than a window has. On one core, 2,048 queries with a window
of 512 took half as long as with 1,024 at a time, with one of 4,096 as long."""


def causal_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Attention [n, H_q, d] of q [n, H_q, d], the last n of m positions, over k, v [m, H, d], each over the newest
    ``window`` positions up to its own.

    Args:
        sinks: float32 [H_q], scores of one more position in every softmax, whose value is 0.
        cu_seqlens: None for one sequence. Of S packed ones, each of which sees itself alone: int32 [S + 1], the start
            of each one's queries, from 0 to n.
        lengths: queries of each of those, for the host; None where only the device knows them, as in a graph.
        cu_seqlens_k: int32 [S + 1], the start of each one's keys, from 0 to m or less; None where n = m and they are
            whole.
    """
    attend = partial(_attend, window=window, sinks=sinks)
    return attend(q, k, v) if cu_seqlens is None else of_each(attend, q, k, v, cu_seqlens, lengths, cu_seqlens_k)


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Tensor:
    """That of one sequence."""
    out = torch.empty_like(q)
    n, m = q.shape[0], k.shape[0]
    for start in range(0, n, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, n)
        first, last = max(0, m - n + start - window + 1), m - n + stop
        mask = torch.ones(stop - start, last - first, dtype=torch.bool, device=q.device)
        mask = mask.tril(m - n + start - first).triu(m - n + start - first - window + 1)
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[start:stop], k[first:last], v[first:last]))
        if sinks is not None:  # a key of zeros, to whose score of 0 the mask adds the sink
            seen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
            column = sinks.to(q.dtype)[:, None, None].expand(-1, len(seen), 1)
            mask = torch.cat((seen.expand(len(sinks), -1, -1), column), -1)
            keys, values = (pad(x, (0, 0, 0, 1)) for x in (keys, values))
        some = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        out[start:stop] = some.squeeze(0).transpose(0, 1)
    return out
