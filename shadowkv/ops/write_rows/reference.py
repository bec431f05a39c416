"""Rows into pages in PyTorch."""

from __future__ import annotations

from torch import Tensor


def write_rows(rows: Tensor, field: Tensor, pages: Tensor, across_bus: bool) -> None:
    """Writes full pages.

    Args:
        rows: [L, n, 64, H, x].
        field: [L, N, H, C, c, x] of the same dtype, views over all pages, C c = 64; pinned host memory appears as a
            tensor of the device that writes it.
        pages: int64 [n], which of the N take them.
        across_bus: whether ``field`` is on the other side of a bus, which a few writers saturate.
    """
    field[:, pages] = rows.transpose(2, 3).unflatten(3, field.shape[3:5])
