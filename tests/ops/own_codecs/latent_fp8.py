"""A key codec of tests: latents as fp8 (e4m3)."""

import torch
from torch import Tensor

from shadowkv.ops.codec import LatentCodec


class Fp8Latents(LatentCodec):
    id, name, largest = 1010, "low-rank-fp8", 240

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return rank, torch.uint8

    def encode(self, latents: Tensor) -> Tensor:
        return latents.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, stored: Tensor, rank: int) -> Tensor:
        return stored.view(torch.float8_e4m3fn).to(torch.bfloat16)
