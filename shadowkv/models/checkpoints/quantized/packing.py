"""Packs and unpacks codes: in int32 words, as in quantized checkpoints, and in bytes, as in ``GroupForm``."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks words, int32 [N, W], to codes, uint8 [N, W * 32 / bits]. The first code is in a word's lowest bits.
    ``bits`` is 4 or 8."""
    packed = words.contiguous().view(torch.uint8)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes of 4 or 8 bits, uint8 [N, K], into bytes, uint8 [N, K * bits / 8]. Of two 4-bit codes, the first is
    in the lower half of the byte."""
    codes = codes.contiguous()
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4


def in_any_order(codes: Tensor, zeros: Tensor | None, scales: Tensor, groups: Tensor, bits: int) -> Tensor:
    """Dequantizes columns whose groups are in any order, as activation order (``desc_act``) makes them.

    Args:
        codes: codes of N rows and K columns, uint8 [N, K].
        zeros: zero points of rows and groups, uint8 [N, G]. If None, every zero point is the middle code,
            2 ** (bits - 1).
        scales: scale of each row and each of G groups of columns, [N, G].
        groups: the group of each column, [K].

    Returns:
        float32 [N, K]. Raises ValueError for a group that does not exist.
    """
    groups = groups.long()
    if groups.min() < 0 or groups.max() >= scales.shape[1]:
        raise ValueError(
            f"its columns are in groups {groups.min()} to {groups.max()}, but scales are only for groups 0 to "
            f"{scales.shape[1] - 1}"
        )
    middle = 1 << (bits - 1)
    zero = middle if zeros is None else zeros.float()[:, groups]
    return (codes.float() - zero) * scales.float()[:, groups]


def in_order(groups: Tensor, size: int) -> bool:
    """Whether each group is ``size`` neighbouring columns, in order. ``groups`` [K] has the group of each column."""
    return torch.equal(groups.long(), torch.arange(len(groups)) // size)
