"""Sketched keys in PyTorch, in the layout of ``sign_scores``."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.sign_scores.reference import pack_sketch


def sketch_keys(
    keys: Tensor,
    mean: Tensor,
    maps: Tensor,
    states: Tensor,
    signs: Tensor,
    rest: Tensor,
    scale: Tensor,
    pages: Tensor,
) -> None:
    """Writes the sketches of full pages of keys minus their sequence's mean.

    Args:
        keys: [L, n, 64, H, d], after RoPE.
        mean: float32 [L, states, H, d].
        maps: bfloat16 [L, states, H, d, d], by which the keys of each sequence and kv head are multiplied.
        states: int64 [n], or [1] when all pages are of one sequence: the rows of ``mean`` and ``maps``.
        signs, rest: uint8 [L, N, H, 64, S], views over all pages.
        scale: uint8 [L, N, H, 64].
        pages: int64 [n], which of the N take them.
    """
    centred = (keys - mean[:, states].unsqueeze(2)).transpose(2, 3)  # [L, n, H, 64, d]
    for field, packed in zip((signs, rest, scale), pack_sketch(centred @ maps[:, states].float()), strict=True):
        field[:, pages] = packed
