"""Products of sorted rows with experts' matrices by PyTorch's grouped kernel (CUTLASS), or by Triton's where experts
have few rows: where these end is read on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import gpu_missing

CAPABILITIES = (9, 10)
"""Major compute capabilities, of Hopper and Blackwell: on others PyTorch loops over experts, and the host waits."""

MULTIPLE = 8
"""K and N must be multiples of this: rows begin at multiples of 16 bytes."""

MAX_EXPERTS = 1023

FEW = 128
"""Rows of an expert, in the mean, up to which Triton's kernel is faster, as its tiles are lower: it takes 13 to 17 %
less time there, and 7 to 13 % more at 256 rows. Those of experts on other ranks count, too, as how many they are is not
known on the host."""


def missing() -> list[str]:
    """Reasons why it cannot run here."""
    return gpu_missing() + unless(hasattr(F, "grouped_mm"), f"torch {torch.__version__} has no grouped_mm")


def supports(case: Case) -> list[str]:
    """Reasons why it cannot serve."""
    major = None if case.capability is None else case.capability[0]
    return [
        *unless(case.dtype == torch.bfloat16, f"it multiplies torch.bfloat16, not {case.dtype}"),
        *unless(major in CAPABILITIES, f"it is for GPUs of compute capability 9 and 10, not {major}"),
    ]


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Same as the reference.

    Raises:
        ValueError: sizes K or N that are not multiples of 8, or more than 1,023 experts.
    """
    experts, out_features, in_features = weight.shape
    if out_features % MULTIPLE or in_features % MULTIPLE or experts > MAX_EXPERTS:
        raise ValueError(
            f"grouped_matmul on a GPU takes multiples of {MULTIPLE} and up to {MAX_EXPERTS} experts, "
            f"not {experts} of {out_features} x {in_features}"
        )
    if len(x) <= FEW * experts:
        from shadowkv.ops.grouped_matmul.triton_tiles import multiply_in_tiles

        return multiply_in_tiles(x, weight, offsets)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets[1:])
