"""Products with quantised rows in C++, for few tokens without a copy of them: ``csrc/cpu/quantised_matmul.h``."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.dequantise_blocks.cpu import dequantise_blocks
from shadowkv.ops.extension import load_cpu as available
from shadowkv.ops.quantised_matmul.reference import multiply_tiles

__all__ = ["available", "quantised_matmul"]

MOST_FUSED = {torch.bfloat16: 24}
"""Tokens up to which products here are faster than PyTorch's with dequantised tiles, of dtypes in which those can be
faster than in float32. There the two are as fast from 128 to 512 tokens (2,048 x 2,048 weights, a core of a Zen 4)."""

MOST_FUSED_OTHERS = 96


def quantised_matmul(x: Tensor, blocks: Tensor, form: str) -> Tensor:
    """As the reference; few tokens are multiplied in float32, with weights that are never rounded."""
    if len(x) <= MOST_FUSED.get(x.dtype, MOST_FUSED_OTHERS):
        product: Tensor = torch.ops.shadowkv.quantised_matmul(x.float(), blocks, form)
        return product.to(x.dtype)
    return multiply_tiles(x, blocks, form, dequantise_blocks)
