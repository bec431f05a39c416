"""Queries for a key sketch in PyTorch. They are multiplied by their sequence's map, quantized, and put into the order
of the sketch's bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PLANES = 4
"""Bits per number in queries that are multiplied with signs. Reducing keys to signs causes 40 times the error that
reducing queries to 4 bits causes."""


def plane_bytes(dim: int) -> int:
    """Bytes of one plane of a key's sketch: one bit per dimension, padded to a multiple of 8 bytes."""
    return -(-dim // 64) * 8


@dataclass(frozen=True)
class SketchQueries:
    """Queries that were scaled to length 1, multiplied by the map, and rounded to whole numbers.

    Dimension j d/8 + b of a query is ``whole[j, b]``. In a key's plane, bit j of byte b belongs to this dimension.

    Attributes:
        whole: int8 [B, H_q, 8, S] with S = ``plane_bytes(d)``, from -127 to 127; 0 for padding bytes of a plane.
        unit: float32 [B, H_q], the unit of the whole numbers. ``whole * unit`` is the query scaled to length 1 and then
            multiplied by the map. A query that is 0 has unit 0.
        sum: int32 [B, H_q], sum of the whole numbers.
        planes: uint8 [B, H_q, 4, S], bit planes of the whole numbers divided by 16 and rounded, from -8 to 7. Bit j of
            byte b of row p is bit p of the number from ``whole[..., j, b]``.
        plane_sum: int32 [B, H_q], sum of the numbers in ``planes``.
        length: float32 [B, H_q], length of each query times d**-0.5, which is the factor of scores in a softmax.
    """

    whole: Tensor
    unit: Tensor
    sum: Tensor
    planes: Tensor
    plane_sum: Tensor
    length: Tensor

    def of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Returns ``whole`` as float32 [B, H, G, 8 S], for G query heads per kv head, and its units [B, H, G]. The last
        dimension has the order of ``plane_bits(plane, 8 * S)``."""
        whole, unit = (x.unflatten(1, (heads, -1)) for x in (self.whole, self.unit))
        return whole.flatten(-2).float(), unit

    def rounded_of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """As ``of_heads``, for the numbers in ``planes``."""
        whole, unit = self.of_heads(heads)
        return in_sixteenths(whole), 16 * unit


def in_sixteenths(whole: Tensor) -> Tensor:
    """Divides whole numbers from -127 to 127, float32 [...], by 16 and rounds them, halves up. Returns float32 [...]
    from -8 to 7."""
    return ((whole + 8) / 16).floor().clamp(max=7)


def sketch_queries(q: Tensor, maps: Tensor, states: Tensor) -> SketchQueries:
    """Quantizes queries for ``sign_scores`` and ``select_by_sketch``.

    Args:
        q: [B, H_q, d], query heads of B sequences, with d a multiple of 8, after RoPE.
        maps: bfloat16 [states, H, d, d], by which queries are multiplied; one per kv head.
        states: int64 [B], the state of each row in ``maps``.
    """
    dim, heads = q.shape[-1], maps.shape[1]
    x = (q.float().unflatten(1, (heads, -1)) @ maps[states].float()).flatten(1, 2)
    step = (x.abs().amax(-1) * (1 / 127)).clamp_min(1e-30)
    length = q.float().norm(dim=-1)
    numbers = (x * step.reciprocal().unsqueeze(-1)).round().to(torch.int8).unflatten(-1, (8, dim // 8))
    whole = torch.nn.functional.pad(numbers, (0, plane_bytes(dim) - dim // 8))
    rounder = in_sixteenths(whole.float()).to(torch.int8)
    rows = torch.arange(8, dtype=torch.uint8, device=q.device).view(8, 1)
    bits = rounder.view(torch.uint8).unsqueeze(-3) >> rows[:PLANES].unsqueeze(-1) & 1  # by plane, row, byte
    planes = (bits << rows).sum(-2, dtype=torch.uint8)
    unit = torch.where(length > 0, step / length, 0)
    total, rounder_total = (x.sum((-2, -1), dtype=torch.int32) for x in (whole, rounder))
    return SketchQueries(whole, unit, total, planes, rounder_total, length * dim**-0.5)
