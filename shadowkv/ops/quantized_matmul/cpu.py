"""Multiplies by quantized weights, and dequantizes rows, on a CPU. Rows in ``FORMATS``, block formats of GGUF files,
are multiplied and dequantized in C++ (``csrc/cpu/quantized_matmul/``). For other forms, PyTorch does both, as in the
reference.

C++ multiplies without dequantized copies. It does so for few tokens, or with AVX-512 for any number of tokens. For more
tokens, C++ dequantizes tiles of rows, and PyTorch multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.quantized.blocks import BlockForm
from shadowkv.ops.quantized.rows import Form, QuantizedRows
from shadowkv.ops.quantized_matmul.reference import multiply_tiles

__all__ = ["FORMATS", "dequantize_rows", "in_blocks", "missing", "quantized_matmul"]

FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
"""Block formats that ``csrc/cpu/quantized_matmul/quantized_matmul.h`` supports."""


def in_blocks(form: Form) -> bool:
    """Whether ``form`` is one of ``FORMATS``."""
    return isinstance(form, BlockForm) and form.name in FORMATS


def dequantize_rows(rows: QuantizedRows) -> Tensor:
    """Same as the reference, bit for bit."""
    if not in_blocks(rows.form):
        return rows.form.unpack(rows.tensors)
    (blocks,) = rows.tensors
    numbers: Tensor = torch.ops.shadowkv.dequantize_blocks(blocks, rows.form.name)
    return numbers


MAX_FUSED = {torch.bfloat16: 24}
"""Without AVX-512: maximum number of tokens, by dtype, for which C++ is used. For more, PyTorch's product with
dequantized tiles is used. In float32, C++ and PyTorch are equally fast from 128 to 512 tokens (2,048 x 2,048 weights,
one Zen 4 core)."""

MAX_FUSED_OTHERS = 96
"""The same maximum for dtypes that ``MAX_FUSED`` does not list, such as float32."""


def quantized_matmul(x: Tensor, weight: QuantizedRows) -> Tensor:
    """Same as the reference, but weights in block formats are not rounded to the dtype of ``x``. With AVX-512,
    activations are rounded to 16 bits, and each 32 of them share a scale. An activation changes by at most 1/65,278 of
    the largest of these 32."""
    if in_blocks(weight.form) and _fused(x):
        (blocks,) = weight.tensors
        product: Tensor = torch.ops.shadowkv.quantized_matmul(x.float(), blocks, weight.form.name)
        return product.to(x.dtype)
    return multiply_tiles(x, weight, dequantize_rows)


def _fused(x: Tensor) -> bool:
    return torch.ops.shadowkv.cpu_isa() == "avx512" or len(x) <= MAX_FUSED.get(x.dtype, MAX_FUSED_OTHERS)
