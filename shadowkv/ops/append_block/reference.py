"""Copies keys and values of a prompt block in PyTorch."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.apply_rope.reference import apply_rope
from shadowkv.ops.apply_rope.tables import RotaryTables


def append_block(
    k: Tensor, v: Tensor, positions: Tensor, rotary: RotaryTables, keys: Tensor, rope_keys: Tensor, values: Tensor
) -> None:
    """Copies the keys, the RoPE-rotated keys and the values of a prompt block of n tokens.

    Args:
        k, v: [n, H, d], keys before RoPE, and values.
        positions: int64 [n].
        keys, rope_keys, values: [n, H, d], written: ``k``, ``k`` after RoPE, and ``v``.
    """
    keys.copy_(k)
    rope_keys.copy_(apply_rope(k, positions, rotary))
    values.copy_(v)
