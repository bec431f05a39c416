"""Keys in 8-bit steps of their blocks, in PyTorch."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.select_blocks.reference import BLOCK, KeyBlocks, in_steps


def code_key_blocks(k: Tensor, keys: KeyBlocks, first: int) -> None:
    """Writes whole blocks of RoPE-rotated keys [n, H, d], n a multiple of ``BLOCK``, from block ``first`` of ``keys``
    on: each of a head in 127ths of its largest entry."""
    codes, steps = in_steps(k.float().unflatten(0, (-1, BLOCK)), (1, 3))
    keys.codes[first * BLOCK : first * BLOCK + len(k), :, : k.shape[2]] = codes.flatten(0, 1)
    keys.steps[first : first + len(steps)] = steps[:, 0, :, 0]
