"""Attention over all tokens of low-rank keys on Hopper: ``attend_selected`` with every chunk selected, for formats that
no other kernel supports (``csrc/kernels/attend_latents_sm90/``)."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.attend_coded.reference import every_chunk
from shadowkv.ops.attend_selected import cuda_sm90
from shadowkv.ops.attend_selected.cuda_sm90 import missing, supports
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource

__all__ = ["attend_coded", "missing", "supports"]


def attend_coded(
    q: Tensor, keys: KeySource, values: DenseRows | CodedRows, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference, for arguments that ``attend_selected`` on Hopper supports. Can be captured in a CUDA graph
    after a first call. Rows begin and end at chunk boundaries."""
    return cuda_sm90.attend_selected(q, keys, values, every_chunk(keys, begin, end))
