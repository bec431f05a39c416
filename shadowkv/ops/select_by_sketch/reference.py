"""Selection in two levels in PyTorch: the runs with the best signs, then the best chunks of those by all bits."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.select_top_chunks.reference import in_order
from shadowkv.ops.sign_scores.reference import RUN, plane_bits
from shadowkv.ops.sketch_queries.reference import SketchQueries

KEPT_SHARE = 16
"""One of so many runs is looked at closely."""

KEPT_OVER_BUDGET = 4
"""So many times the tokens of the budget at the least."""

EXCLUDED = torch.tensor(-0.0, dtype=torch.float16).view(torch.int16).item()
"""Bits of -0, the scale of a token that may not be selected."""


def kept_runs(num_pages: Tensor, budget: Tensor, chunk: int) -> Tensor:
    """Runs of each row that are looked at closely, int64 [B]."""
    runs = 64 // RUN * num_pages
    share = torch.maximum(-(-runs // KEPT_SHARE), -(-budget * chunk * KEPT_OVER_BUDGET // RUN))
    return torch.minimum(runs, share)


def select_by_sketch(
    queries: SketchQueries,
    coarse: Tensor,
    signs: Tensor,
    rest: Tensor,
    scale: Tensor,
    pages: Tensor,
    num_pages: Tensor,
    budget: Tensor,
    chunk: int,
    k: int,
) -> Tensor:
    """Chunks with the best score of any token with any query of its kv head, queries of length 1.

    Only the runs of 8 tokens with the best ``coarse`` scores are looked at: ``kept_runs`` says how many.

    Args:
        queries: B rows of H_q heads.
        coarse: float16 [B, H, 8 P], of ``sign_scores``.
        signs, rest: uint8 [N, H, 64, S], views over all pages, as ``pack_sketch`` makes them.
        scale: float16 [N, H, 64], -0 for tokens that may not be selected.
        pages: int64 [B, P]; a name past the valid pages may be any that there is.
        num_pages: int64 [B], valid pages of each row, 0 to P.
        budget: int64 [B], chunks to select, at most ``k``.
        chunk: tokens of a chunk, 1, 2, 4 or 8; all of them may be selected or none.
        k: columns of the result.

    Returns:
        int64 [B, H, k] chunk numbers, ascending, -1 where there is none; those come last. Ties, also of ``coarse``
        scores, are broken as the backend likes; scores within a factor of 1 + 2**-10 may count as equal.
    """
    heads, device = signs.shape[1], coarse.device
    whole, unit = queries.of_heads(heads)
    bits = whole.shape[-1]
    keep = kept_runs(num_pages, budget, chunk)
    width = min(coarse.shape[-1], max(-(-coarse.shape[-1] // KEPT_SHARE), -(-k * chunk * KEPT_OVER_BUDGET // RUN)))
    runs = coarse.topk(width, dim=-1).indices  # [B, H, width]
    head = torch.arange(heads, device=device)[:, None]
    names = pages.gather(1, (runs * RUN // 64).flatten(1)).view_as(runs)
    first = runs * RUN % 64

    def of_runs(field: Tensor) -> Tensor:
        """[B, H, width, RUN, ...] of [N, H, 64, ...]: tokens of each run."""
        return field[names.unsqueeze(-1), head.unsqueeze(-1), first.unsqueeze(-1) + torch.arange(RUN, device=device)]

    codes = 2 * plane_bits(of_runs(signs), bits) + plane_bits(of_runs(rest), bits)
    levels = (codes.float() - 1.5).flatten(2, 3)  # [B, H, tokens, 8 S]
    scales = of_runs(scale).flatten(2)
    scores = (unit.unsqueeze(-1) * (whole @ levels.transpose(-1, -2))).amax(2) * scales.float()
    scores = scores.masked_fill(scales.view(torch.int16) == EXCLUDED, float("-inf"))
    scores = scores.unflatten(-1, (-1, chunk)).amax(-1)  # [B, H, width * RUN / c]
    per_run = RUN // chunk
    dropped = torch.arange(width, device=device) >= keep[:, None, None]
    scores = scores.masked_fill(dropped.repeat_interleave(per_run, dim=-1), float("-inf"))
    count = min(k, scores.shape[-1])
    best, at = scores.topk(count, dim=-1)
    numbers = (runs.unsqueeze(-1) * per_run + torch.arange(per_run, device=device)).flatten(2)
    within = torch.arange(count, device=device) < budget[:, None, None]
    chosen = in_order(numbers.gather(-1, at), within & (best > float("-inf")))
    return torch.nn.functional.pad(chosen, (0, k - count), value=-1)
