"""Attention over all tokens of low-rank keys in Triton: ``attend_selected`` with every chunk selected."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.attend_coded.reference import every_chunk
from shadowkv.ops.attend_selected import triton
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource
from shadowkv.ops.attend_selected.triton import supports

__all__ = ["attend_coded", "supports"]


def attend_coded(
    q: Tensor, keys: KeySource, values: DenseRows | CodedRows, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference, for arguments that ``attend_selected`` in Triton supports. Rows begin and end at chunk
    boundaries."""
    return triton.attend_selected(q, keys, values, every_chunk(keys, begin, end))
