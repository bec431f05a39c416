"""Rows of quantised numbers, those in a GGUF file's blocks in C++: ``csrc/cpu/quantised_matmul/``."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.quantised.blocks import BlockForm
from shadowkv.ops.quantised.rows import QuantisedRows

__all__ = ["dequantise_rows", "missing"]


def dequantise_rows(rows: QuantisedRows) -> Tensor:
    """Same as the reference, to the last bit."""
    if not isinstance(rows.form, BlockForm):
        return rows.form.unpack(rows.tensors)
    (blocks,) = rows.tensors
    numbers: Tensor = torch.ops.shadowkv.dequantise_blocks(blocks, rows.form.name)
    return numbers
