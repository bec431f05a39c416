"""Rotary position embedding in PyTorch (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables


def apply_rope(x: Tensor, positions: Tensor, rotary: RotaryTables, inverse: bool = False) -> Tensor:
    """Rotates ``x`` [..., heads, d] by RoPE at ``positions`` int64 [...]. ``inverse`` undoes the rotation.

    If the tables have a magnitude m (YaRN, LongRoPE), the rotated dimensions are also multiplied by m. The inverse
    divides them by m. Computes in float32 and returns the dtype of ``x``.
    """
    return rope_by(x, rotary.cos[positions].unsqueeze(-2), rotary.sin[positions].unsqueeze(-2), rotary, inverse)


def rope_by(x: Tensor, cos: Tensor, sin: Tensor, rotary: RotaryTables, inverse: bool = False) -> Tensor:
    """As ``apply_rope``, with cos and sin [..., dim / 2] already looked up. They broadcast with ``x`` [..., d]."""
    config = rotary.config
    if inverse:
        cos, sin = cos / config.magnitude**2, -sin / config.magnitude**2
    leading, rest = x[..., : config.dim].float(), x[..., config.dim :]
    first, second = halves(leading, config)
    pair = (first * cos - second * sin, second * cos + first * sin)
    leading = torch.stack(pair, dim=-1).flatten(-2) if config.interleaved else torch.cat(pair, dim=-1)
    leading = leading.to(x.dtype)
    return torch.cat((leading, rest.expand(*leading.shape[:-1], -1)), dim=-1) if rest.shape[-1] else leading


def halves(x: Tensor, config: RopeConfig) -> tuple[Tensor, ...]:
    """Splits ``x`` [..., dim] into the first and the second dimension of each pair that RoPE rotates together,
    [..., dim / 2] each."""
    return (x[..., 0::2], x[..., 1::2]) if config.interleaved else x.chunk(2, dim=-1)
