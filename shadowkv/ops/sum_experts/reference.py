"""Weighted sums of experts' rows in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_experts(out: Tensor, row: Tensor, weights: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Returns the sum of ``out[row[t, j]] * weights[t, j]`` over j for every token t.

    Args:
        out: [T k, D], a row for each of the k experts of T tokens, in the order of ``sort_by_expert``.
        row: [T, k], whole numbers, the row of each of a token's k choices.
        weights: float32 [T, k].
        offsets: int32 [count + 1]. If given, rows of ``out`` from ``offsets[-1]`` on are arbitrary and do not count.

    Returns:
        [T, D] in the dtype of ``out``.
    """
    if offsets is not None:
        there = torch.arange(len(out), device=out.device) < offsets[-1]
        out = out.masked_fill(~there.unsqueeze(1), 0)
    return torch.bmm(weights.to(out.dtype).unsqueeze(1), out[row]).squeeze(1)
