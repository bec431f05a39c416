"""Rows of compressed pages in PyTorch, with every chunk selected."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, LatentKeys, heads_and_chunk
from shadowkv.ops.page import PAGE


def rebuild_rows(source: LatentKeys | DenseRows | CodedRows, first: int, out: Tensor, across_bus: bool) -> None:
    """Writes the rows of whole pages, from page number ``first`` of the row on.

    Args:
        source: source of the pages, with one row, B = 1.
        out: [H, m, d], any float dtype, m a multiple of 64.
        across_bus: whether the source is on the other side of a bus, which a few readers saturate.
    """
    chunk = heads_and_chunk(source)[1]
    start, stop = first * PAGE // chunk, (first * PAGE + out.shape[1]) // chunk
    every = torch.arange(start, stop, device=out.device).expand(1, len(out), -1)
    out.copy_(gather_selected(source, every)[0])
