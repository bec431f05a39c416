"""Products of sorted rows with experts' quantized matrices: a loop over experts. Matrices in GGUF's block formats are
multiplied in C++."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.grouped_quantized_matmul.reference import loop
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul.cpu import quantized_matmul

__all__ = ["grouped_quantized_matmul", "missing"]


def grouped_quantized_matmul(x: Tensor, weight: Sequence[Tensor | QuantizedRows], offsets: Tensor) -> Tensor:
    """Same as the reference except for the order of additions."""
    return loop(x, weight, offsets, quantized_matmul)
