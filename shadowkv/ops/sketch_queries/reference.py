"""Queries in 8 bits in PyTorch: rotated, of length 1, in whole numbers that face the bits of a key sketch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.sign_scores.reference import plane_bytes


@dataclass(frozen=True)
class SketchQueries:
    """Queries of length 1 in the layout of key planes: bit j of byte b of a plane faces byte b of row j of ``whole``.

    Attributes:
        whole: int8 [B, H_q, 8, S], from -127 to 127; 0 where a plane's bytes stand for no dimension.
        planes: uint8 [B, H_q, 8, S], the same by bits: bit j of byte b of row p is bit p of ``whole[..., j, b]``.
        unit: float32 [B, H_q], what the whole numbers are multiples of, 0 for a query that is 0.
        sum: int32 [B, H_q], of the whole numbers.
    """

    whole: Tensor
    planes: Tensor
    unit: Tensor
    sum: Tensor

    def of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Whole numbers float32 [B, H, G, 8 S], in the order of ``plane_bits(plane, 8 * S)``, and units [B, H, G]."""
        whole, unit = (x.unflatten(1, (heads, -1)) for x in (self.whole, self.unit))
        return whole.flatten(-2).float(), unit


def sketch_queries(q: Tensor, rotation: Tensor) -> SketchQueries:
    """Queries for ``sign_scores`` and ``select_by_sketch``.

    Args:
        q: [B, H_q, d] with d a multiple of 8, rotated by RoPE.
        rotation: float32 [d, d].
    """
    dim = q.shape[-1]
    x = q.float() @ rotation
    step = (x.abs().amax(-1) * (1 / 127)).clamp_min(1e-30)
    length = x.norm(dim=-1)
    numbers = (x * step.reciprocal().unsqueeze(-1)).round().to(torch.int8).unflatten(-1, (8, dim // 8))
    whole = torch.nn.functional.pad(numbers, (0, plane_bytes(dim) - dim // 8))
    rows = torch.arange(8, dtype=torch.uint8, device=q.device).view(8, 1, 1)
    bits = whole.view(torch.uint8).unsqueeze(-3) >> rows & 1  # of plane, row, byte
    planes = (bits << rows.view(8, 1)).sum(-2, dtype=torch.uint8)
    unit = torch.where(length > 0, step / length, 0)
    return SketchQueries(whole, planes, unit, whole.sum((-2, -1), dtype=torch.int32))
