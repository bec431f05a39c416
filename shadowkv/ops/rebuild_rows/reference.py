"""Rebuilds rows of compressed pages in PyTorch: ``gather_selected`` with every chunk selected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows, DenseRows, LatentKeys, heads_and_chunk
from shadowkv.ops.page import PAGE


def rebuild_rows(
    source: LatentKeys | DenseRows | CodedRows, first: int, out: Tensor, across_bus: bool, rows: Tensor | None = None
) -> None:
    """Writes the plain rows of whole pages, of one sequence or of several segments.

    Args:
        source: source of the pages. Its page table has one row, [1, P]. Its ``states`` and ``first`` have one entry, or
            R entries if ``rows`` is given.
        first: index of the first page in the table.
        out: [H, m, d], rows of m tokens by kv head, any float dtype, m a multiple of 64. Written.
        across_bus: whether the source is in host memory, behind a bus that a few thread blocks saturate.
        rows: int64 [m / 64], for each page, the index of its entry in ``states`` and ``first``. That entry of ``first``
            is the position that the table's page 0 would have. A negative index marks a page that is not needed, whose
            rows of ``out`` are arbitrary. None if there is only one entry.
    """
    heads, chunk = heads_and_chunk(source)
    if rows is None:
        start, stop = first * PAGE // chunk, (first * PAGE + out.shape[1]) // chunk
        every = torch.arange(start, stop, device=out.device).expand(1, heads, -1)
        out.copy_(gather_selected(source, every)[0])
        return
    every = torch.arange(PAGE // chunk, device=out.device).expand(len(rows), heads, -1)
    out.copy_(gather_selected(_by_page(source, first, rows.clamp(min=0)), every).transpose(0, 1).flatten(1, 2))


def _by_page(
    source: LatentKeys | DenseRows | CodedRows, first: int, rows: Tensor
) -> LatentKeys | DenseRows | CodedRows:
    """Turns each page from ``first`` on into a sequence of one page. The page's number in ``rows`` is the index of its
    state and first position."""
    pages = slice(first, first + len(rows))
    changed: dict[str, Any] = {"pages": source.pages[0, pages, None]}
    if isinstance(source, LatentKeys | CentredKeys):
        number = torch.arange(first, first + len(rows), device=rows.device)
        changed["first"] = source.first[rows] + number * PAGE
    if not isinstance(source, DenseRows) and source.states is not None:
        changed["states"] = source.states[rows]
    if isinstance(source, CodedRows) and source.scale_pages is not None:
        changed["scale_pages"] = source.scale_pages[0, pages, None]
    return replace(source, **changed)
