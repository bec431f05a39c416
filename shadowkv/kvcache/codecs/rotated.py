"""Rows as codes of 4, 3 or 2 bits: rotated, divided into equal steps, packed as the CUDA kernel reads them.

After a rotation the entries of a row are close to Gaussian with deviation ||x|| / sqrt(d), whatever the row
(TurboQuant, arXiv:2504.19874), so one step per width is optimal for all rows.

Layout. Dimension 16 i + 8 half + g belongs to lane g = 0 .. 7, and each lane's bytes lie together. A byte holds, from
its low bits up, the codes of one i at 4 bits (half 0, half 1) and of two consecutive i at 2 bits. 3 bits are the plane
of the lower two bits and behind it, for all lanes, the plane of the upper ones: four consecutive i in a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.codec import CodecId, UniformRows


class RotatedRows(UniformRows):
    """Codes are levels of the quantiser that is optimal for a unit Gaussian (Max, 1960), the scale of a row is its
    least-squares step, 0 for a zero row.

    Attributes:
        planes: bits of a code that lie together, the lowest first.
    """

    def __init__(self, id: int, step: float, *planes: int) -> None:
        self.id, self.step, self.planes, self.bits = id, step, planes, sum(planes)
        self.name, self.row_multiple = f"rotated-{self.bits}bit", 64 // min(planes)

    def row_bytes(self, dim: int) -> int:
        return dim * self.bits // 8

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        self.check(rows.shape[-1])
        y = rows.float() if rotation is None else rows.float() @ rotation
        step = self.step * y.norm(dim=-1, keepdim=True) / y.shape[-1] ** 0.5
        middle = 2 ** (self.bits - 1)
        levels = torch.floor(y / step.masked_fill(step == 0, 1)).clamp(-middle, middle - 1)
        centres = levels + 0.5
        scale = (y * centres).sum(-1, keepdim=True) / centres.square().sum(-1, keepdim=True)
        return self._pack((levels + middle).to(torch.uint8)), scale.half()

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        self.check(dim)
        y = (self._unpack(codes, dim).float() - (2**self.bits - 1) / 2) * scale.float()
        return y if rotation is None else y @ rotation.T

    def _pack(self, codes: Tensor) -> Tensor:
        lanes = codes.unflatten(-1, (-1, 8)).transpose(-1, -2)  # [..., g, 2 i + half]
        planes, shift = [], 0
        for width in self.planes:
            part = ((lanes >> shift) & (2**width - 1)).unflatten(-1, (-1, 8 // width))
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
            planes.append((part << places).sum(-1, dtype=torch.uint8).flatten(-2))
            shift += width
        return torch.cat(planes, dim=-1)

    def _unpack(self, codes: Tensor, dim: int) -> Tensor:
        lanes = codes.new_zeros(*codes.shape[:-1], 8, dim // 8)
        shift = 0
        for width, plane in zip(self.planes, codes.split([dim * width // 8 for width in self.planes], dim=-1)):
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
            part = (plane.unflatten(-1, (8, -1)).unsqueeze(-1) >> places) & (2**width - 1)
            lanes |= part.flatten(-2) << shift
            shift += width
        return lanes.transpose(-1, -2).flatten(-2)


ROTATED_ROWS = {
    4: RotatedRows(CodecId.ROTATED_4BIT, 0.3352, 4),
    3: RotatedRows(CodecId.ROTATED_3BIT, 0.5860, 2, 1),
    2: RotatedRows(CodecId.ROTATED_2BIT, 0.9957, 2),
}
"""By bits."""
