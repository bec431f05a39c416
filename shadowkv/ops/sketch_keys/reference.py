"""Sketches keys in PyTorch, in the layout that ``sign_scores`` reads."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.sign_scores.reference import pack_sketch

SKETCHED_AT_ONCE = 128
"""Pages, summed over layers, that are sketched at a time, to limit the memory of float32 copies of keys and maps."""


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
    """Writes the sketches of full pages of keys. The sequence's mean key is subtracted first.

    Args:
        keys: [L, n, 64, H, d], n pages of keys of L layers, after RoPE.
        mean: float32 [L, states, H, d].
        maps: bfloat16 [L, states, H, d, d], by which centred keys are multiplied.
        states: int64 [n], the state of each page in ``mean`` and ``maps``, or [1] if all pages share one.
        signs, rest: uint8 [L, N, H, 64, S], views over all pages. S bytes hold one bit per dimension of a key
            (``plane_bytes``). Written.
        scale: uint8 [L, N, H, 64]. Written.
        pages: int64 [n], page ids, at which sketches are written.
    """
    step = max(1, SKETCHED_AT_ONCE // max(1, len(keys)))
    for start in range(0, len(pages), step):
        some = slice(start, start + step)
        own = states if len(states) == 1 else states[some]
        centred = (keys[:, some] - mean[:, own].unsqueeze(2)).transpose(2, 3)  # [L, n, H, 64, d]
        for field, packed in zip((signs, rest, scale), pack_sketch(centred @ maps[:, own].float()), strict=True):
            field[:, pages[some]] = packed
