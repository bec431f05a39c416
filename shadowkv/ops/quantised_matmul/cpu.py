"""Products with rows in a GGUF file's blocks in C++, without a copy of the rows for few tokens, or with AVX-512 for any
number: ``csrc/cpu/quantised_matmul/``; those in other forms as the reference has them."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.dequantise_rows.cpu import dequantise_rows, in_blocks
from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.quantised.rows import QuantisedRows
from shadowkv.ops.quantised_matmul.reference import multiply_tiles

__all__ = ["missing", "quantised_matmul"]

MAX_FUSED = {torch.bfloat16: 24}
"""Without AVX-512: most tokens for which products here are faster than PyTorch's with dequantised tiles, by dtypes in
which the latter can be faster than in float32. In float32 the two are equally fast from 128 to 512 tokens (2,048 x
2,048 weights, one Zen 4 core)."""

MAX_FUSED_OTHERS = 96


def quantised_matmul(x: Tensor, weight: QuantisedRows) -> Tensor:
    """Same as the reference, with weights in blocks that are never rounded. With AVX-512 activations are, to 16 bits
    with a scale for every 32 of them: an activation changes by up to 1/65,278 of the largest of these."""
    if in_blocks(weight.form) and _fused(x):
        (blocks,) = weight.tensors
        product: Tensor = torch.ops.shadowkv.quantised_matmul(x.float(), blocks, weight.form.name)
        return product.to(x.dtype)
    return multiply_tiles(x, weight, dequantise_rows)


def _fused(x: Tensor) -> bool:
    return torch.ops.shadowkv.cpu_isa() == "avx512" or len(x) <= MAX_FUSED.get(x.dtype, MAX_FUSED_OTHERS)
