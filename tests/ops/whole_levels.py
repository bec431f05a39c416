"""Rows as kernels decode them that multiply levels as whole numbers."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

from shadowkv.ops.attend_selected.sources import CodedRows
from shadowkv.ops.codec import RowCodec


def with_whole_levels(rows: CodedRows) -> CodedRows:
    """The rows with a codec whose levels are rounded to multiples of a step (``whole_levels``)."""
    return replace(rows, codec=_rounded(rows.codec, rows.dim))


def _rounded(codec: RowCodec, dim: int) -> RowCodec:
    found = codec.whole_levels(dim)
    if found is None:
        return codec
    multiples, step = found
    near, usual = copy(codec), codec.code_levels(dim, torch.device("cpu"))
    near.levels = tuple(multiple * step / usual[0].item() * codec.levels[0] for multiple in multiples)
    return near
