"""Copies rows into pages in PyTorch."""

from __future__ import annotations

from torch import Tensor


def write_rows(rows: Tensor, field: Tensor, pages: Tensor, across_bus: bool) -> None:
    """Writes n full pages in each of L layers.

    Args:
        rows: [L, n, 64, H, x].
        field: [L, N, H, C, c, x] of the same dtype, views over all pages, each of C chunks of c tokens, C c = 64.
            Pinned host memory is passed as a tensor of the device that writes it.
        pages: int64 [n], page ids, at which rows are written.
        across_bus: whether ``field`` is in host memory, behind a bus that a few thread blocks saturate.
    """
    field[:, pages] = rows.transpose(2, 3).unflatten(3, field.shape[3:5])
