"""Rebuilds rows of compressed pages in PyTorch: ``gather_selected`` with every chunk selected."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows, LatentKeys, heads_and_chunk
from shadowkv.ops.page import PAGE


def rebuild_rows(source: LatentKeys | DenseRows | CodedRows, first: int, out: Tensor, across_bus: bool) -> None:
    """Writes the plain rows of whole pages of a sequence.

    Args:
        source: source of the pages, with B = 1.
        first: index of the first page in the sequence's table.
        out: [H, m, d], rows of m tokens by kv head, any float dtype, m a multiple of 64. Written.
        across_bus: whether the source is in host memory, behind a bus that a few thread blocks saturate.
    """
    chunk = heads_and_chunk(source)[1]
    start, stop = first * PAGE // chunk, (first * PAGE + out.shape[1]) // chunk
    every = torch.arange(start, stop, device=out.device).expand(1, len(out), -1)
    out.copy_(gather_selected(source, every)[0])
