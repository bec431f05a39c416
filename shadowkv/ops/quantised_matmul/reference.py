"""Products with rows of quantised numbers in PyTorch, which dequantises one tile of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shadowkv.ops.dequantise_rows.reference import dequantise_rows
from shadowkv.ops.quantised.rows import QuantisedRows

TILE = 2**20
"""Numbers dequantised at a time: 4 MiB stay in cache, and the product with them is large enough."""


def quantised_matmul(x: Tensor, weight: QuantisedRows) -> Tensor:
    """x Wᵀ, where W are rows of quantised numbers.

    Args:
        x: [T, K], any float dtype.
        weight: rows [N, K] in any form.

    Returns:
        [T, N] in the dtype of ``x``, to which W is converted for the product too.

    Raises ValueError if the tensors of ``weight`` do not fit its form, or do not have K numbers a row.
    """
    return multiply_tiles(x, weight, dequantise_rows)


def multiply_tiles(x: Tensor, weight: QuantisedRows, dequantise: Callable[[QuantisedRows], Tensor]) -> Tensor:
    """Same as ``quantised_matmul``, with any backend's ``dequantise_rows``.

    Raises:
        ValueError: the tensors of ``weight`` do not fit its form, or do not have K numbers a row.
    """
    if weight.columns != x.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}, rows of {weight.form.name} have {weight.columns} numbers")
    out = x.new_empty(len(x), len(weight))
    for rows, tile in weight.tiles(TILE):
        torch.mm(x, dequantise(tile).to(x.dtype).T, out=out[:, rows])
    return out
