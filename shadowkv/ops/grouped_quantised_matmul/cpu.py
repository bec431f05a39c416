"""Products of sorted rows with experts' quantised matrices: a loop over experts. Matrices in GGUF's block formats are
multiplied in C++."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.grouped_quantised_matmul.reference import loop
from shadowkv.ops.quantised.rows import QuantisedRows
from shadowkv.ops.quantised_matmul.cpu import quantised_matmul

__all__ = ["grouped_quantised_matmul", "missing"]


def grouped_quantised_matmul(x: Tensor, weight: Sequence[Tensor | QuantisedRows], offsets: Tensor) -> Tensor:
    """Same as the reference except for the order of additions."""
    return loop(x, weight, offsets, quantised_matmul)
