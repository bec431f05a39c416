"""Rotation and scatter of new tokens in PyTorch."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.rotate.reference import rotate
from shadowkv.ops.rotate.tables import RotaryTables


def append_tokens(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotary: RotaryTables,
    k_pages: Tensor,
    v_pages: Tensor,
    write_page: Tensor,
    write_offset: Tensor,
) -> None:
    """Rotates keys and writes them, and the values, to row ``write_offset`` of page ``write_page``.

    Args:
        k, v: [B, H, d], keys before the rotation.
        positions, write_page, write_offset: int64 [B].
        k_pages, v_pages: [N, H, 64, d], views over all pages.
    """
    k_pages[write_page, :, write_offset] = rotate(k, positions, rotary)
    v_pages[write_page, :, write_offset] = v
