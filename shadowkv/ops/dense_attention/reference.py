"""Dense attention in PyTorch. The form with a log-sum-exp computes the softmax itself; the others call PyTorch's fused
kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from shadowkv.ops.dense_attention.forms import DenseAttention, Packed, of_each

NEEDS_LENGTHS = ("packed", "windowed")
"""Forms for which the host must know the lengths of packed sequences. A CUDA graph would keep the lengths that it was
captured with."""

SCORES_AT_ONCE = 2**24
"""Maximum number of scores, over all query heads, that ``partial`` holds in memory at once: 64 MB in float32."""

QUERIES_AT_ONCE = 256
"""Number of queries that ``windowed`` computes at a time. The smaller this number, the fewer unneeded scores outside of
windows are computed. On one core and with a window of 512, 2,048 queries took half as long as with 1,024 queries at a
time. With a window of 4,096, both numbers were equally fast."""


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention [n, H_q, d] of q [n, H_q, d], the last n of m positions, over k, v [m, H, d]."""
    n, m, mask = len(q), len(k), None
    if n != m:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def partial(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """As ``causal``, but returns the log-sum-exp too, float32 [n, H_q]. With ``causal=False``, each query sees all m
    positions."""
    n, m = len(q), len(k)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    rows = max(1, SCORES_AT_ONCE // (q.shape[1] * m))
    parts = []
    for start in range(0, n, rows):
        some = q[start : start + rows]
        seen = m - n + start + len(some) if causal else m
        parts.append(_attend(some, keys[:, :seen], values[:, :seen], causal))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, lse


def packed(q: Tensor, k: Tensor, v: Tensor, pack: Packed) -> Tensor:
    """As ``causal``, for each packed sequence of q [n, H_q, d] and k, v [m, H, d]. Returns the results [n, H_q, d]."""
    return of_each(causal, q, k, v, pack)


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None, pack: Packed | None) -> Tensor:
    """As ``causal``, but each position sees only ``window`` positions: its own and those just before it. Sinks are
    float32 [H_q]."""

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend_windowed(q, k, v, window, sinks)

    return one(q, k, v) if pack is None else of_each(one, q, k, v, pack)


dense_attention = DenseAttention(causal, partial, packed, windowed)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    n, _, dim = q.shape
    heads, m = k.shape[:2]
    grouped = q.view(n, heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)  # [H, G * n, d]
    scores = (grouped @ k.transpose(-1, -2)).float().unflatten(1, (-1, n)) * dim**-0.5
    if causal:
        later = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        scores.masked_fill_(later, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().flatten(1, 2)
    out = (weights.to(v.dtype) @ v).unflatten(1, (-1, n))  # [H, G, n, d]
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype), lse.squeeze(-1).permute(2, 0, 1).flatten(1)


def _attend_windowed(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None) -> Tensor:
    """``windowed`` for one sequence."""
    out = torch.empty_like(q)
    n, m = q.shape[0], k.shape[0]
    for start in range(0, n, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, n)
        first, last = max(0, m - n + start - window + 1), m - n + stop
        mask = torch.ones(stop - start, last - first, dtype=torch.bool, device=q.device)
        mask = mask.tril(m - n + start - first).triu(m - n + start - first - window + 1)
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[start:stop], k[first:last], v[first:last]))
        if sinks is not None:  # an additional key of zeros has score 0, and the mask adds the sink to it
            seen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
            column = sinks.to(q.dtype)[:, None, None].expand(-1, len(seen), 1)
            mask = torch.cat((seen.expand(len(sinks), -1, -1), column), -1)
            keys, values = (pad(x, (0, 0, 0, 1)) for x in (keys, values))
        some = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        out[start:stop] = some.squeeze(0).transpose(0, 1)
    return out
