"""Quantised rows in PyTorch, in the layout of ``attend_selected.packing``."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.attend_selected import packing


def quantise_rows(
    rows: Tensor, rotation: Tensor, bits: int, codes: Tensor, code_pages: Tensor, scale: Tensor, scale_pages: Tensor
) -> None:
    """Writes the codes and scales of full pages.

    Args:
        rows: [L, n, 64, H, d].
        rotation: float32 [d, d].
        bits: 4, 3 or 2.
        codes: uint8 [L, N, H, C, c, d * bits / 8], views over all pages, C c = 64.
        code_pages: int64 [n], which of the N take the codes.
        scale: float16 [L, N', H, 64].
        scale_pages: int64 [n], which of the N' take the scales.

    Raises:
        ValueError: as ``packing.quantise_rows``.
    """
    packed, steps = packing.quantise_rows(rows, rotation, bits)
    codes[:, code_pages] = packed.transpose(2, 3).unflatten(3, codes.shape[3:5])
    scale[:, scale_pages] = steps.transpose(2, 3)
