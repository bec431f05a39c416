"""Encodes rows in PyTorch, by calling their codec."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.codec import RowCodec

CODED_AT_ONCE = 128
"""Pages of one layer that are encoded at a time, to limit the memory of float32 copies."""


def quantize_rows(
    rows: Tensor,
    codec: RowCodec,
    rotation: Tensor | None,
    state: tuple[Tensor, ...],
    codes: Tensor,
    code_pages: Tensor,
    scale: Tensor,
    scale_pages: Tensor,
) -> None:
    """Writes the codes and scales of full pages.

    Args:
        rows: [L, n, 64, H, d], n pages of rows of L layers.
        codec: codec of the rows.
        rotation: float32 [d, d], the codec's rotation, or None if it has none.
        state: tensors of the codec's state, [L, n, H, ...] each, or [L, 1, H, ...] if all pages share one.
        codes: uint8 [L, N, H, C, c, w], views over all pages, each of C chunks of c tokens, C c = 64. Written.
        code_pages: int64 [n], page ids, at which codes are written.
        scale: [L, N', H, 64, s] in the codec's dtype, written unless s is 0.
        scale_pages: int64 [n], page ids, at which scales are written.

    Raises:
        ValueError: as ``codec.encode``.
    """
    layers, pages = rows.shape[:2]
    step = max(1, CODED_AT_ONCE // max(1, layers))
    for start in range(0, pages, step):
        some = slice(start, start + step)
        own = tuple((x if x.shape[1] == 1 else x[:, some]).unsqueeze(3) for x in state)
        coded, scales = codec.encode(rows[:, some].transpose(2, 3), rotation, own)
        codes[:, code_pages[some]] = coded.unflatten(3, codes.shape[3:5])
        if scale.shape[-1]:
            scale[:, scale_pages[some]] = scales
