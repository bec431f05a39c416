"""Rotated rows with equal steps, in codes of 4, 3 or 2 bits, packed as the CUDA kernel reads them.

After a rotation the entries of any row x are nearly Gaussian with deviation ||x|| / sqrt(d) (TurboQuant,
arXiv:2504.19874). So for each width of codes, one step, in units of this deviation, is optimal for all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.codecs.packing import Lanes
from shadowkv.ops.codec import CodecId, UniformRows


class RotatedRows(UniformRows):
    """Codes are levels of the optimal uniform quantizer of a unit Gaussian (Max, 1960). The scale of a row is the step
    with the smallest squared error for the row's codes; 0 for a zero row."""

    def __init__(self, id: int, step: float, packing: Lanes) -> None:
        self.id, self.step, self.packing, self.bits = id, step, packing, packing.bits
        self.name, self.row_multiple = f"rotated-{self.bits}bit", packing.row_multiple

    def row_bytes(self, dim: int) -> int:
        return self.packing.row_bytes(dim)

    def upper_places(self, dim: int) -> tuple[int, ...]:
        return self.packing.upper_places(dim)

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        self.check(rows.shape[-1])
        y = rows.float() if rotation is None else rows.float() @ rotation
        step = self.step * y.norm(dim=-1, keepdim=True) / y.shape[-1] ** 0.5
        middle = 2 ** (self.bits - 1)
        levels = torch.floor(y / step.masked_fill(step == 0, 1)).clamp(-middle, middle - 1)
        centres = levels + 0.5
        scale = (y * centres).sum(-1, keepdim=True) / centres.square().sum(-1, keepdim=True)
        return self.packing.pack((levels + middle).to(torch.uint8)), scale.half()

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        self.check(dim)
        y = (self.packing.unpack(codes, dim).float() - (2**self.bits - 1) / 2) * scale.float()
        return y if rotation is None else y @ rotation.T


ROTATED_ROWS = {
    4: RotatedRows(CodecId.ROTATED_4BIT, 0.3352, Lanes(4)),
    3: RotatedRows(CodecId.ROTATED_3BIT, 0.5860, Lanes(2, 1)),
    2: RotatedRows(CodecId.ROTATED_2BIT, 0.9957, Lanes(2)),
}
"""Codecs by bits."""
