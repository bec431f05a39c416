"""Codecs of latents: in the cache's dtype, in 8 bits, or in 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shadowkv.ops.codec import STRONG, CodecId, LatentCodec


class DenseLatents(LatentCodec):
    id, name = CodecId.LATENT_DENSE, "low-rank"

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return rank, dtype

    def encode(self, latents: Tensor, *widths: Tensor) -> Tensor:
        return latents

    def decode(self, stored: Tensor, rank: int, *widths: Tensor) -> Tensor:
        return stored


class Int8Latents(LatentCodec):
    id, name, largest = CodecId.LATENT_INT8, "low-rank-int8", 127

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return rank, torch.int8

    def encode(self, latents: Tensor, *widths: Tensor) -> Tensor:
        return latents.round().clamp(-self.largest, self.largest).to(torch.int8)

    def decode(self, stored: Tensor, rank: int, *widths: Tensor) -> Tensor:
        return stored


class Int4Latents(LatentCodec):
    """The first ``strong`` latents, those of the strongest principal components, have a byte each: the latent plus 128.
    Each later byte has two of the other latents, each plus 8: the first of the two in the low four bits, the second in
    the high four.

    Codes are unsigned, because kernels turn them into floats without a conversion: they put a code into the low bits of
    the mantissa of 1024, or of 16 times 1024, and subtract this number later.

    Attributes:
        strong: number of rank dimensions in 8 bits, an even number. If the rank is smaller, all dimensions are in 8
            bits.
    """

    id, name, largest, rank_multiple = CodecId.LATENT_INT4, "low-rank-int4", 127, 2

    def __init__(self, strong: int = STRONG) -> None:
        self.strong = strong

    def of_groups(self, ranks: Sequence[int]) -> Int4Latents:
        return Int4Latents(sum(min(STRONG, rank) for rank in ranks))

    def largest_codes(self, rank: int, device: torch.device) -> Tensor:
        return torch.where(torch.arange(rank, device=device) < self.strong, 127.0, 7.0)

    def field(self, rank: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return (rank + min(self.strong, rank)) // 2, torch.uint8

    def encode(self, latents: Tensor, *widths: Tensor) -> Tensor:
        largest = self.largest_codes(latents.shape[-1], latents.device)
        codes = torch.minimum(torch.maximum(latents.round(), -largest), largest) + largest + 1
        strong, weak = codes.to(torch.uint8)[..., : self.strong], codes.to(torch.uint8)[..., self.strong :]
        return torch.cat((strong, weak[..., ::2] | weak[..., 1::2] << 4), dim=-1)

    def decode(self, stored: Tensor, rank: int, *widths: Tensor) -> Tensor:
        strong = 2 * stored.shape[-1] - rank
        codes, pairs = stored[..., :strong], stored[..., strong:]
        weak = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
        return torch.cat((codes.to(torch.int16) - 128, weak.to(torch.int16) - 8), dim=-1).to(torch.int8)
