"""RoPE and scatter of new tokens in PyTorch."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.apply_rope.tables import RotaryTables


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
    """Writes one token's RoPE-rotated key and value per sequence to row ``write_offset`` of page ``write_page``.

    Args:
        k, v: [B, H, d], keys before RoPE, and values.
        positions, write_page, write_offset: int64 [B].
        k_pages, v_pages: [N, H, 64, d], views over all pages.
    """
    k_pages[write_page, :, write_offset] = apply_rope(k, positions, rotary)
    v_pages[write_page, :, write_offset] = v
