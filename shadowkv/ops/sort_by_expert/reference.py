"""Choices of experts in the order of these, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_expert(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A row for every choice that a token made, sorted by expert, and by token where that is the same.

    Args:
        experts: [T, k], whole numbers.
        first, count: experts that are here: ``count`` of them from ``first`` on; rows of others are behind theirs.

    Returns:
        token [T k], that of every row; number [T k], its expert, counted from ``first`` on, ``count`` where that is not
        here; row [T, k], that of every choice: each whole numbers. offsets, int32 [count + 1]: where the rows of each
        expert begin, and where the last one's end.
    """
    number = experts.flatten() - first
    number = number.masked_fill((number < 0) | (number >= count), count)
    number, order = number.sort(stable=True)
    offsets = torch.searchsorted(number, torch.arange(count + 1, device=number.device), out_int32=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    return order // experts.shape[1], number, row.view(experts.shape), offsets
