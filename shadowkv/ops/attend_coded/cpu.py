"""Attention over all tokens in C++: ``attend_selected`` with every chunk selected
(``csrc/cpu/attention/attend_selected.h``)."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.attend_coded.reference import every_chunk
from shadowkv.ops.attend_selected import cpu
from shadowkv.ops.attend_selected.cpu import missing, supports
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, KeySource, heads_and_chunk

__all__ = ["attend_coded", "missing", "supports"]


def attend_coded(
    q: Tensor, keys: KeySource, values: DenseRows | CodedRows, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference, but computed entirely in float32. Rows begin and end at chunk boundaries.

    Raises:
        ValueError: a row begins or ends within a chunk.
    """
    chunk = heads_and_chunk(keys)[1]
    for name, place in (("begin", begin), ("end", end)):
        if (place % chunk).any():
            raise ValueError(f"{name} {place.tolist()} are not at chunks of {chunk} tokens")
    return cpu.attend_selected(q, keys, values, every_chunk(keys, begin, end), None)
