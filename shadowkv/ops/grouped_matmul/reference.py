"""Products of sorted rows with experts' matrices in PyTorch: a loop over experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

SYNCHRONISES = True
"""The loop needs to know where each expert's rows end."""


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[s] W_eᵀ for every row s, of the expert e whose rows it is among.

    Args:
        x: [S, K], sorted by expert.
        weight: [E, N, K].
        ends: int32 [E], the number of rows of each expert and of those before it; at most S.

    Returns:
        [S, N] in the dtype of ``x``; rows from ``ends[-1]`` on have any numbers.
    """
    out = x.new_empty(len(x), weight.shape[1])
    for expert, rows in experts_rows(ends):
        out[rows] = F.linear(x[rows], weight[expert])
    return out


def experts_rows(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have any rows, and which, of ``grouped_matmul``'s ``ends``, int32 [E]; waits for the device."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
