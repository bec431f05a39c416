"""Latents as they are, or in whole steps of 8 or 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.codec import CodecId, LatentCodec


class DenseLatents(LatentCodec):
    id, name = CodecId.LATENT_DENSE, "low-rank"

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return rank, dtype

    def encode(self, latents: Tensor) -> Tensor:
        return latents

    def decode(self, stored: Tensor, rank: int) -> Tensor:
        return stored


class Int8Latents(LatentCodec):
    id, name, largest = CodecId.LATENT_INT8, "low-rank-int8", 127

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return rank, torch.int8

    def encode(self, latents: Tensor) -> Tensor:
        return latents.round().clamp(-self.largest, self.largest).to(torch.int8)

    def decode(self, stored: Tensor, rank: int) -> Tensor:
        return stored


class Int4Latents(LatentCodec):
    """Two to a byte, latent 2 i in the low four bits of byte i and 2 i + 1 in the high ones, both plus 8.

    Codes without a sign are put into the mantissa of a float of 1024 or 16 times that by one mask and one or, for both
    latents of a byte at a time, and an addition takes what is too much away.
    """

    id, name, largest, rank_multiple = CodecId.LATENT_INT4, "low-rank-int4", 7, 2

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return rank // 2, torch.uint8

    def encode(self, latents: Tensor) -> Tensor:
        codes = (latents.round().clamp(-self.largest, self.largest) + 8).to(torch.uint8).unflatten(-1, (-1, 2))
        return codes[..., 0] | codes[..., 1] << 4

    def decode(self, stored: Tensor, rank: int) -> Tensor:
        return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
