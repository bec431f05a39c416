"""Sorts the tokens' choices of experts by expert, and sums experts' rows by their weights, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_expert(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts the k choices of each of T tokens by expert, then by token. Each choice becomes one row.

    Args:
        experts: whole numbers [T, k], the chosen experts.
        first, count: first expert and number of experts on this rank. Rows of other experts come last.

    Returns:
        Four tensors of whole numbers. token [T k] is the token of each row. number [T k] is the expert of each row
        minus ``first``, or ``count`` for experts of other ranks. row [T, k] is the row of each choice. offsets, int32
        [count + 1]: the expert with number e has the rows ``offsets[e]`` to ``offsets[e + 1]``.
    """
    number = experts.flatten() - first
    number = number.masked_fill((number < 0) | (number >= count), count)
    number, order = number.sort(stable=True)
    offsets = torch.searchsorted(number, torch.arange(count + 1, device=number.device), out_int32=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    return order // experts.shape[1], number, row.view(experts.shape), offsets


def sum_experts(out: Tensor, row: Tensor, weights: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Returns the sum of ``out[row[t, j]] * weights[t, j]`` over j for every token t.

    Args:
        out: [T k, D], a row for each of the k experts of T tokens, in the order of ``sort_by_expert``.
        row: [T, k], whole numbers, the row of each of a token's k choices.
        weights: float32 [T, k].
        offsets: int32 [count + 1]. If given, rows of ``out`` from ``offsets[-1]`` on are arbitrary and are left out of
            the sum.

    Returns:
        [T, D] in the dtype of ``out``.
    """
    if offsets is not None:
        there = torch.arange(len(out), device=out.device) < offsets[-1]
        out = out.masked_fill(~there.unsqueeze(1), 0)
    return torch.bmm(weights.to(out.dtype).unsqueeze(1), out[row]).squeeze(1)
