"""Paged decode attention in C++. Pages are read in place (``csrc/cpu/attention/paged_attention.h``)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless_one_of
from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.sequence_rows import SequenceRows

__all__ = ["missing", "paged_attention", "supports"]


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve a case."""
    return unless_one_of(case.dtype, (torch.float32, torch.bfloat16))


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor, sequences: SequenceRows | None = None
) -> tuple[Tensor, Tensor]:
    """Same as the reference, for float32 or bfloat16. Scores and softmax weights are always float32. Results are
    bitwise equal for any number of threads. Each row reads its pages, also if ``sequences`` has several."""
    return torch.ops.shadowkv.paged_attention(q, k, v, pages, counts)
