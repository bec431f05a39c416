"""Sorts choices by expert in PyTorch."""

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
