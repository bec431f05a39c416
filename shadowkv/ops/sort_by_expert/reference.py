"""Sorts choices by expert in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_expert(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Makes one row for each of a token's k choices, sorted by expert, then by token.

    Args:
        experts: whole numbers [T, k], the chosen experts.
        first, count: the range of experts on this rank. Rows of other experts come last.

    Returns:
        token [T k], the token of each row; number [T k], the expert of each row minus ``first``, or ``count`` for
        experts of other ranks; row [T, k], the row of each choice, all whole numbers; and offsets, int32 [count + 1],
        the start of each expert's rows, and the end of the last one's.
    """
    number = experts.flatten() - first
    number = number.masked_fill((number < 0) | (number >= count), count)
    number, order = number.sort(stable=True)
    offsets = torch.searchsorted(number, torch.arange(count + 1, device=number.device), out_int32=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    return order // experts.shape[1], number, row.view(experts.shape), offsets
