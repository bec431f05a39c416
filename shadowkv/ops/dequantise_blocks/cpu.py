"""Rows of quantised blocks in C++: ``csrc/cpu/quantised_matmul/``."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing

__all__ = ["dequantise_blocks", "missing"]


def dequantise_blocks(blocks: Tensor, form: str) -> Tensor:
    """Same as the reference, to the last bit."""
    return torch.ops.shadowkv.dequantise_blocks(blocks, form)
