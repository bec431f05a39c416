"""Products of sorted rows with experts' matrices in PyTorch: a loop over experts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor
from torch.nn import functional as F

SYNCHRONISES = True
"""The host waits for the device, because the loop needs to know where each expert's rows end."""


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, total_experts: int | None = None) -> Tensor:
    """Returns x[s] W_eᵀ for every row s, where e is the row's expert.

    Args:
        x: [S, K], S rows sorted by expert.
        weight: [E, N, K], a matrix for each of E experts.
        offsets: int32 [E + 1]. The rows of expert e are ``offsets[e]`` to ``offsets[e + 1]``. The first number is 0,
            the last is at most S.
        total_experts: number of experts on all ranks, among which the S rows are divided; None for E. Kernels choose
            their tiles by this number; the result does not depend on it.

    Returns:
        [S, N] in the dtype of ``x``. Rows from ``offsets[-1]`` on are arbitrary.
    """
    out = x.new_empty(len(x), weight.shape[1])
    for expert, rows in experts_rows(offsets):
        out[rows] = F.linear(x[rows], weight[expert])
    return out


def experts_rows(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields each expert that has rows, and the range of its rows. ``offsets``, int32 [E + 1], is that of
    ``grouped_matmul``. The host waits for the device."""
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if end > start:
            yield expert, slice(start, end)
