"""Queries in PyTorch: mapped as their sequence's sketch has it, in whole numbers that face the sketch's bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PLANES = 4
"""Bits of the rounder numbers that signs are scored with: what signs leave out of a key is 40 times as much."""


def plane_bytes(dim: int) -> int:
    """Bytes of one of a key's two planes: a bit a dimension, padded to 8 bytes."""
    return -(-dim // 64) * 8


@dataclass(frozen=True)
class SketchQueries:
    """Queries of length 1, then mapped, laid out as key planes: bit j of byte b of a plane faces byte b of row j of
    ``whole``.

    Attributes:
        whole: int8 [B, H_q, 8, S], from -127 to 127; 0 where a plane's bytes stand for no dimension.
        unit: float32 [B, H_q], what the whole numbers are multiples of, 0 for a query that is 0.
        sum: int32 [B, H_q], of the whole numbers.
        planes: uint8 [B, H_q, 4, S], the whole numbers in sixteenths, rounded, from -8 to 7, by bits: bit j of byte b
            of row p is bit p of that of ``whole[..., j, b]``.
        plane_sum: int32 [B, H_q], of those.
        length: float32 [B, H_q], of the queries, times d**-0.5: what scores are multiplied by in a softmax.
    """

    whole: Tensor
    unit: Tensor
    sum: Tensor
    planes: Tensor
    plane_sum: Tensor
    length: Tensor

    def of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Whole numbers float32 [B, H, G, 8 S], in the order of ``plane_bits(plane, 8 * S)``, and units [B, H, G]."""
        whole, unit = (x.unflatten(1, (heads, -1)) for x in (self.whole, self.unit))
        return whole.flatten(-2).float(), unit

    def rounded_of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """As ``of_heads``, of the numbers in ``planes``."""
        whole, unit = self.of_heads(heads)
        return in_sixteenths(whole), 16 * unit


def in_sixteenths(whole: Tensor) -> Tensor:
    """Whole numbers from -127 to 127, float32 [...], in sixteenths, float32 [...]: rounded, halves up, from -8 to 7."""
    return ((whole + 8) / 16).floor().clamp(max=7)


def sketch_queries(q: Tensor, maps: Tensor, states: Tensor) -> SketchQueries:
    """Queries for ``sign_scores`` and ``select_by_sketch``.

    Args:
        q: [B, H_q, d] with d a multiple of 8, after RoPE.
        maps: bfloat16 [states, H, d, d], what the queries of each sequence and kv head are multiplied by.
        states: int64 [B], the rows of ``maps``.
    """
    dim, heads = q.shape[-1], maps.shape[1]
    x = (q.float().unflatten(1, (heads, -1)) @ maps[states].float()).flatten(1, 2)
    step = (x.abs().amax(-1) * (1 / 127)).clamp_min(1e-30)
    length = q.float().norm(dim=-1)
    numbers = (x * step.reciprocal().unsqueeze(-1)).round().to(torch.int8).unflatten(-1, (8, dim // 8))
    whole = torch.nn.functional.pad(numbers, (0, plane_bytes(dim) - dim // 8))
    rounder = in_sixteenths(whole.float()).to(torch.int8)
    rows = torch.arange(8, dtype=torch.uint8, device=q.device).view(8, 1)
    bits = rounder.view(torch.uint8).unsqueeze(-3) >> rows[:PLANES].unsqueeze(-1) & 1  # of plane, row, byte
    planes = (bits << rows).sum(-2, dtype=torch.uint8)
    unit = torch.where(length > 0, step / length, 0)
    total, rounder_total = (x.sum((-2, -1), dtype=torch.int32) for x in (whole, rounder))
    return SketchQueries(whole, unit, total, planes, rounder_total, length * dim**-0.5)
