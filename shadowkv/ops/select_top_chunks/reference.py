"""ShadowKV's selection in PyTorch (arXiv:2410.21465, algorithm 2): ragged top-k of softmax shares."""

from __future__ import annotations

import torch
from torch import Tensor


def select_top_chunks(logits: Tensor, lse: Tensor, budget: Tensor, k: int, mass: float | None = None) -> Tensor:
    """Selects the chunks with the best scores for each kv head. A chunk's score is its largest softmax share in any
    query head of the kv head.

    Args:
        logits: float32 [B, H, G, chunks], of B sequences, H kv heads and G query heads per kv head; -inf where a chunk
            may not be selected. NaN counts as -inf.
        lse: float32 [B, H, G, T], log-sum-exps of ``logits`` over T disjoint sets of chunks, which together are all
            chunks.
        budget: int64 [B], chunks to select, at most ``k``.
        k: columns of the result.
        mass: if given, selection stops as soon as the selected chunks, in descending order of shares, have this share
            of the softmax of every query head of the kv head.

    Returns:
        Chunk numbers, int64 [B, H, k], ascending, then -1s. Backends may choose differently among equal shares, and
        treat shares within a factor of 1 + 2**-24 as equal.
    """
    shares = logits - lse.logsumexp(-1, keepdim=True)
    scores = shares.masked_fill(~shares.isfinite(), float("-inf")).amax(2)
    count = min(k, scores.shape[-1])
    # Stable, unlike topk: among equal shares the first chunks are selected, whatever the number of padding columns.
    best, chosen = (x[..., :count] for x in scores.sort(dim=-1, descending=True, stable=True))
    beyond = torch.arange(count, device=logits.device) >= budget[:, None, None]
    if mass is not None:
        ranked = shares.gather(-1, chosen.unsqueeze(2).expand(-1, -1, shares.shape[2], -1)).exp()
        before = ranked.cumsum(-1) - ranked
        beyond = beyond | (before >= mass).all(2)
    chosen = in_order(chosen, ~beyond & (best > float("-inf")))
    return torch.nn.functional.pad(chosen, (0, k - count), value=-1)


def in_order(chosen: Tensor, keep: Tensor) -> Tensor:
    """Returns those of the chunks int64 [..., k] that ``keep`` bool [..., k] marks, ascending, then -1s."""
    last = torch.iinfo(torch.int64).max
    found = chosen.masked_fill(~keep, last).sort(dim=-1).values
    return found.masked_fill(found == last, -1)
