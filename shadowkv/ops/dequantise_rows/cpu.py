"""Dequantises rows: GGUF formats of ``FORMATS`` in C++ (``csrc/cpu/quantised_matmul/``), all others in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.quantised.blocks import BlockForm
from shadowkv.ops.quantised.rows import Form, QuantisedRows

__all__ = ["FORMATS", "dequantise_rows", "in_blocks", "missing"]

FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
"""Block formats that ``csrc/cpu/quantised_matmul/quantised_matmul.h`` supports."""


def in_blocks(form: Form) -> bool:
    """Whether ``form`` is one of ``FORMATS``."""
    return isinstance(form, BlockForm) and form.name in FORMATS


def dequantise_rows(rows: QuantisedRows) -> Tensor:
    """Same as the reference, bit for bit."""
    if not in_blocks(rows.form):
        return rows.form.unpack(rows.tensors)
    (blocks,) = rows.tensors
    numbers: Tensor = torch.ops.shadowkv.dequantise_blocks(blocks, rows.form.name)
    return numbers
