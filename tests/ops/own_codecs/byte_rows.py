"""Value codecs for tests: rows in bytes, rotated with one scale, or not rotated with one scale per 32 dimensions."""

import torch
from torch import Tensor

from shadowkv.ops.codec import RowCodec


class ByteRows(RowCodec):
    """Whole steps plus 128. Lane g has dimensions 16 i + 8 half + g, in the order of 2 i + half."""

    row_multiple = 64

    def __init__(self, id: int, name: str, rotated: bool) -> None:
        self.id, self.name, self.rotated = id, name, rotated

    def row_bytes(self, dim: int) -> int:
        return dim

    def scales(self, dim: int) -> int:
        return 1 if self.rotated else dim // 32

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        blocks = (rows.float() if rotation is None else rows.float() @ rotation).unflatten(
            -1, (self.scales(rows.shape[-1]), -1)
        )
        scale = (blocks.abs().amax(-1) / 127).half()
        steps = (blocks / scale.float().clamp(min=1e-6).unsqueeze(-1)).round().clamp(-128, 127)
        codes = (steps + 128).to(torch.uint8).flatten(-2)
        return codes.unflatten(-1, (-1, 8)).transpose(-1, -2).flatten(-2), scale

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        steps = codes.unflatten(-1, (8, -1)).transpose(-1, -2).flatten(-2).float() - 128
        y = (steps.unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)).flatten(-2)
        return y if rotation is None else y @ rotation.T


ROTATED_BYTES = ByteRows(1011, "rotated-bytes", True)
BLOCK_BYTES = ByteRows(1012, "block-bytes", False)
