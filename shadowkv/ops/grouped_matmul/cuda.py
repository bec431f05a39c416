"""Products of sorted rows with experts' matrices by PyTorch's grouped kernel (CUTLASS), or by our Triton kernel if
experts have few rows. Both kernels read ``offsets`` on the device, so the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import gpu_missing

CAPABILITIES = (9, 10)
"""Major compute capabilities of Hopper and Blackwell. On other GPUs PyTorch loops over experts, and the host waits."""

MULTIPLE = 8
"""K and N must be multiples of this, so that rows start at multiples of 16 bytes."""

MAX_EXPERTS = 1023

FEW = 128
"""The Triton kernel is used up to this mean number of rows per expert, because its tiles have fewer rows than those of
PyTorch's kernel. Up to this number, it takes 13 to 17 % less time than PyTorch's kernel. At 256 rows, it takes 7 to 13
% more."""


def missing() -> list[str]:
    """Why this backend cannot run here."""
    return gpu_missing() + unless(hasattr(F, "grouped_mm"), f"torch {torch.__version__} has no grouped_mm")


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve a case."""
    major = None if case.capability is None else case.capability[0]
    return [
        *unless(case.dtype == torch.bfloat16, f"it multiplies torch.bfloat16, not {case.dtype}"),
        *unless(major in CAPABILITIES, f"it is for GPUs of compute capability 9 and 10, not {major}"),
    ]


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, total_experts: int | None = None) -> Tensor:
    """Same as the reference.

    Raises:
        ValueError: K or N is not a multiple of 8, or there are more than 1,023 experts.
    """
    experts, out_features, in_features = weight.shape
    if out_features % MULTIPLE or in_features % MULTIPLE or experts > MAX_EXPERTS:
        raise ValueError(
            f"grouped_matmul on a GPU needs sizes in multiples of {MULTIPLE} and at most {MAX_EXPERTS} experts, "
            f"not {experts} experts of {out_features} x {in_features}"
        )
    if len(x) <= FEW * (total_experts or experts):
        from shadowkv.ops.grouped_matmul.triton import multiply_in_tiles

        return multiply_in_tiles(x, weight, offsets, total_experts)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets[1:])
