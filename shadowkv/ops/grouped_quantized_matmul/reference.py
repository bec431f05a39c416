"""Products of sorted rows with experts' quantized matrices in PyTorch: a loop over experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.grouped_matmul.reference import experts_rows
from shadowkv.ops.quantized.rows import QuantizedRows, cut_out
from shadowkv.ops.quantized_matmul.reference import quantized_matmul

SYNCHRONISES = True
"""The host waits for the device, because the loop needs to know where each expert's rows end."""


def grouped_quantized_matmul(x: Tensor, weight: Sequence[Tensor | QuantizedRows], offsets: Tensor) -> Tensor:
    """Returns x[s] W_eᵀ for every row s, where e is the row's expert.

    Args:
        x: [S, K], S rows sorted by expert, any float dtype.
        weight: the matrices W_e [N, K] of all E experts, one after another. They are given as consecutive blocks of
            rows, whose forms (``quantized.rows.Form``) may differ.
        offsets: int32 [E + 1], as for ``grouped_matmul``.

    Returns:
        [S, N] in the dtype of ``x``. Rows from ``offsets[-1]`` on are arbitrary.
    """
    return loop(x, weight, offsets, quantized_matmul)


def loop(
    x: Tensor,
    weight: Sequence[Tensor | QuantizedRows],
    offsets: Tensor,
    multiply: Callable[[Tensor, QuantizedRows], Tensor],
) -> Tensor:
    """As ``grouped_quantized_matmul``. ``multiply`` is the ``quantized_matmul`` of a backend."""
    each = sum(map(len, weight)) // (len(offsets) - 1)
    out = x.new_empty(len(x), each)
    for expert, rows in experts_rows(offsets):
        column = 0
        for block in cut_out(weight, expert * each, (expert + 1) * each):
            columns = slice(column, column := column + len(block))
            out[rows, columns] = F.linear(x[rows], block) if isinstance(block, Tensor) else multiply(x[rows], block)
    return out
