"""Products of sorted rows with experts' matrices in Triton, for GPUs for which PyTorch has no grouped kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.grouped_matmul.triton_tiles import multiply_in_tiles

DTYPES = (torch.bfloat16, torch.float16)


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve a case."""
    return unless(case.dtype in DTYPES, f"it multiplies torch.bfloat16 and torch.float16, not {case.dtype}")


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Same as the reference."""
    return multiply_in_tiles(x, weight, offsets)
