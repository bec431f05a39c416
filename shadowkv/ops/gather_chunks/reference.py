"""Chunk gather in PyTorch, from the device or from host memory."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_chunks(rows: Tensor, pages: Tensor, selected: Tensor) -> Tensor:
    """Rows of selected chunks, on the device of ``selected``.

    Args:
        rows: [N, H, C, c, d], views over all pages; in host memory the chosen rows are copied over.
        pages: int64 [B, P].
        selected: int64 [B, H, k]; -1 yields some row of the sequence, to be masked by the reader.

    Returns:
        [B, H, k * c, d].
    """
    names, chunks = locate(pages, selected, rows.shape[2])
    heads = torch.arange(selected.shape[1], device=selected.device)[:, None]
    where = [index.to(rows.device) for index in (names, heads, chunks)]
    return rows[where[0], where[1], where[2]].to(selected.device, non_blocking=True).flatten(2, 3)


def locate(pages: Tensor, selected: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Page names and chunk numbers within them, int64 [B, H, k] each, of selected chunks (-1 counts as 0)."""
    selected = selected.clamp(min=0)
    names = pages.gather(1, (selected // chunks).flatten(1)).view_as(selected)
    return names, selected % chunks
