"""Products with quantised rows in PyTorch, which dequantises one tile of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shadowkv.ops.dequantise_blocks.reference import columns_of, dequantise_blocks

TILE = 2**20
"""Numbers dequantised at a time: 4 MiB stay in cache, and the product with them is large enough."""


def quantised_matmul(x: Tensor, blocks: Tensor, form: str) -> Tensor:
    """x Wᵀ, where W are the numbers of quantised blocks.

    Args:
        x: [T, K], any float dtype.
        blocks: uint8 [N, B], rows of blocks with K numbers in total.
        form: format of the blocks, one of ``FORMATS`` (``dequantise_blocks``).

    Returns:
        [T, N] in the dtype of ``x``, to which W is converted for the product too.

    Raises ValueError if rows are not whole blocks, or do not have K numbers.
    """
    return multiply_tiles(x, blocks, form, dequantise_blocks)


def multiply_tiles(x: Tensor, blocks: Tensor, form: str, dequantise: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Same as ``quantised_matmul``, with any backend's ``dequantise_blocks``.

    Raises:
        ValueError: rows are not whole blocks, or do not have K numbers.
    """
    columns = columns_of(blocks, form)
    if columns != x.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}, rows of blocks have {columns} numbers")
    out, rows = x.new_empty(len(x), len(blocks)), max(1, TILE // max(1, columns))
    for start in range(0, len(blocks), rows):
        weight = dequantise(blocks[start : start + rows], form).to(x.dtype)
        torch.mm(x, weight.T, out=out[:, start : start + rows])
    return out
