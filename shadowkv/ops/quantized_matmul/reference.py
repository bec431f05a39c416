"""Matrix products with quantized weights in PyTorch. One tile of rows is dequantized at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shadowkv.ops.quantized.rows import QuantizedRows


def dequantize_rows(rows: QuantizedRows) -> Tensor:
    """Dequantizes rows [N, K] to float32 [N, K].

    Args:
        rows: N rows of K columns, in any form.

    Raises:
        ValueError: the tensors do not fit the form.
    """
    return rows.form.unpack(rows.tensors)


TILE = 2**20
"""Numbers dequantized at a time. Their 4 MiB stay in cache, and are enough for an efficient product."""


def quantized_matmul(x: Tensor, weight: QuantizedRows) -> Tensor:
    """Returns x Wᵀ with quantized weights W.

    Args:
        x: [T, K], activations of T tokens, any float dtype.
        weight: W [N, K] in any form. It is converted to the dtype of ``x`` for the product.

    Returns:
        [T, N] in the dtype of ``x``.

    Raises:
        ValueError: the tensors of ``weight`` do not fit its form, or do not have K numbers per row.
    """
    return multiply_tiles(x, weight, dequantize_rows)


def multiply_tiles(x: Tensor, weight: QuantizedRows, dequantize: Callable[[QuantizedRows], Tensor]) -> Tensor:
    """As ``quantized_matmul``. ``dequantize`` is the ``dequantize_rows`` of a backend."""
    if weight.columns != x.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}, rows of {weight.form.name} have {weight.columns} numbers")
    out = x.new_empty(len(x), len(weight))
    for rows, tile in weight.tiles(TILE):
        torch.mm(x, dequantize(tile).to(x.dtype).T, out=out[:, rows])
    return out
