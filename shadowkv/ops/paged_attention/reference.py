"""Paged decode attention in PyTorch. It computes a partial softmax per page and merges the results of each sequence's
pages (split-KV, FlashDecoding). So the work grows with the number of pages of all sequences, and not with the longest
sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.sequence_rows import SequenceRows

SYNCHRONISES = True
"""The host counts the pages in use. To do so, it waits for the device."""

GATHERED_AT_ONCE = 4096
"""Number of pages gathered at a time, to limit the memory of copies."""


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor, sequences: SequenceRows | None = None
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention over pages that hold any number of valid tokens.

    Args:
        q: [B, H_q, d], query heads of B rows, after RoPE.
        k, v: [N, H, 64, d], kv heads of 64 tokens per page, views over all N pages.
        pages: int64 [B, E], E page ids per row.
        counts: int64 [B, E], number of valid tokens at the start of each page. A page with 0 is skipped.
        sequences: which rows belong to one sequence. These have the same pages, and no count of a row is above that of
            the next row. Another backend can then read the pages once for all of them: it multiplies what only later
            rows attend to by 0, so these tokens must be finite. If it is None, each row is a sequence.

    Returns:
        out [B, H_q, d] in the dtype of ``q`` and its log-sum-exp, float32 [B, H_q]: 0 and -inf for a row without
        tokens.
    """
    batch, query_heads, dim = q.shape
    heads, page = k.shape[1], k.shape[2]
    grouped = q.view(batch, heads, query_heads // heads, dim)
    rows, columns = counts.nonzero(as_tuple=True)
    outs, sums = [], []
    for start in range(0, max(1, len(rows)), GATHERED_AT_ONCE):
        row, column = rows[start : start + GATHERED_AT_ONCE], columns[start : start + GATHERED_AT_ONCE]
        page_ids = pages[row, column]
        empty = torch.arange(page, device=q.device) >= counts[row, column, None]
        scores = (grouped[row] @ k[page_ids].transpose(-1, -2)).float() * dim**-0.5
        scores.masked_fill_(empty[:, None, None, :], float("-inf"))
        total = scores.logsumexp(-1)
        weights = (scores - total.unsqueeze(-1)).exp()
        # Rows past the count may hold NaN, and 0 * NaN is NaN.
        values = v[page_ids].masked_fill(empty[:, None, :, None], 0)
        outs.append((weights.to(v.dtype) @ values).float())
        sums.append(total)
    return _merge_pages(torch.cat(outs), torch.cat(sums), rows, q)


def _merge_pages(out: Tensor, lse: Tensor, rows: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    batch, (heads, group) = q.shape[0], lse.shape[1:]
    index = rows[:, None, None].expand_as(lse)
    peak = lse.new_full((batch, heads, group), float("-inf")).scatter_reduce(0, index, lse, "amax")
    weight = (lse - peak[rows]).exp()
    total = torch.zeros_like(peak).index_add_(0, rows, weight)
    merged = out.new_zeros(batch, heads, group, out.shape[-1]).index_add_(0, rows, out * weight.unsqueeze(-1))
    merged /= total.where(total > 0, 1).unsqueeze(-1)
    return merged.flatten(1, 2).to(q.dtype), (peak + total.log()).flatten(1, 2)
