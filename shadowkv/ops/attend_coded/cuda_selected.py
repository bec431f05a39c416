"""Attention over all tokens of low-rank keys in CUDA: ``attend_selected`` with every chunk selected, for formats that
no other kernel supports (``csrc/kernels/attend_selected/``)."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.attend_coded.reference import every_chunk
from shadowkv.ops.attend_selected import cuda
from shadowkv.ops.attend_selected.cuda import missing
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource
from shadowkv.ops.case import Case, unless

__all__ = ["attend_coded", "missing", "supports"]


def supports(case: Case) -> list[str]:
    """Why this backend cannot serve ``case``."""
    return unless(case.rank > 0, f"codec {case.key_codec} of keys is not one of latents") or cuda.supports(case)


def attend_coded(
    q: Tensor, keys: KeySource, values: DenseRows | CodedRows, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference, for arguments that ``attend_selected`` in CUDA supports. Can be captured in a CUDA graph
    after a first call. Rows begin and end at chunk boundaries."""
    return cuda.attend_selected(q, keys, values, every_chunk(keys, begin, end))
