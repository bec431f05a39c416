"""Attention over coded rows in C++: every chunk of them selected (``csrc/cpu/attend_selected.h``)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.attend_selected import cpu
from shadowkv.ops.attend_selected.cpu import available, supports
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows

__all__ = ["attend_coded", "available", "supports"]


def attend_coded(
    q: Tensor, keys: DenseRows | CodedRows, values: DenseRows | CodedRows, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """As the reference, but all of it in float32, and runs begin and end with a chunk.

    Raises:
        ValueError: one that does not.
    """
    rows = keys.rows if isinstance(keys, DenseRows) else keys.codes
    chunk = rows.shape[3]
    for name, place in (("begin", begin), ("end", end)):
        if (place % chunk).any():
            raise ValueError(f"{name} {place.tolist()} are not at chunks of {chunk} tokens")
    chunks = torch.arange(keys.pages.shape[1] * rows.shape[2]).expand(len(q), -1) + (begin // chunk)[:, None]
    selected = chunks.masked_fill(chunks >= (end // chunk)[:, None], -1).unsqueeze(1)
    return cpu.attend_selected(q, keys, values, selected.expand(-1, rows.shape[1], -1), None)
