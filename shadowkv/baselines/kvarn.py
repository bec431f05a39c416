"""KVarN (arXiv:2606.03458): codes of rotated rows, after the variances of tokens and of channels are normalised.

A channel is a dimension of the head. Entries of a page are quantized in equal steps between the smallest and the
largest entry. In keys, the 64 entries of a channel share a step size; in values, the entries of a token do. One token
or channel with large entries would make the shared step coarse for all. So a page is first divided by a scale per token
and a scale per channel. The two are computed in alternation (Sinkhorn's iteration, on standard deviations). This is the
method's variant with 64 tokens, which are a page here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from shadowkv.kvcache import codecs, presets
from shadowkv.kvcache.codecs.packing import pack_bits, unpack_bits
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.ops.codec import CodecId, RowCodec
from shadowkv.ops.page import PAGE
from shadowkv.ops.rotations import walsh_hadamard

ITERATIONS = 16
"""Number of iterations. Each scales the channels and then the tokens. The scales of the iteration with the most even
standard deviations are used."""

LIMITS = 2.0**-6, 2.0**10
"""Range of scales, in units of the page's standard deviation. Without limits, rows that are nearly constant would be
scaled up without bound."""

LEAST = 1e-10
"""Entries with a smaller standard deviation count as constant."""


class VarianceNormalisedRows(RowCodec):
    """Codes whole pages of 64 rows (axis -2). A row stores its token's scales. The page's channel scales are divided
    evenly among its 64 rows, so each row then stores 1/64 of them.

    An entry is (code x step + minimum) x scale. In keys, each channel has a step and a minimum, and each token has a
    scale. In values, each token has a step and a minimum, and each channel has a scale. Steps, minima and scales are
    rounded to float16, and codes are chosen for the rounded numbers. The scales (not the steps) of a page are
    normalised so that their product is 1 before rounding.

    Attributes:
        bits: bits of a code.
        steps_of: the axis along which entries share a step: -2 for the tokens of a channel, -1 for the channels of a
            token.
    """

    rotated = True
    tile = PAGE
    bits: ClassVar[int]
    steps_of: ClassVar[int]

    def wanted(self, dim: int) -> str | None:
        return f"a power of two from {PAGE} on" if dim < PAGE or dim & (dim - 1) else None

    def rotation_matrix(self, dim: int, name: str) -> Tensor:
        return walsh_hadamard(torch.eye(dim)) / dim**0.5

    def row_bytes(self, dim: int) -> int:
        return dim * self.bits // 8

    def scales(self, dim: int) -> int:
        of_token, of_channel = self._counts()
        return of_token + of_channel * dim // PAGE

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        self.check(rows.shape[-1])
        if rows.shape[-2] % PAGE:
            raise ValueError(f"{self.name} rows are coded {PAGE} at a time, not {rows.shape[-2]}")
        y = (rows.float() if rotation is None else rows.float() @ rotation).unflatten(-2, (-1, PAGE))
        of_token, of_channel = balance(y)
        gauge, other = (of_token, of_channel) if self.steps_of == -2 else (of_channel, of_token)
        mean = gauge.log().mean((-2, -1), keepdim=True).exp()
        gauge, other = (gauge / mean).to(self.scale_dtype), other * mean
        flat = y / gauge.float() / other
        least, most = flat.amin(self.steps_of, keepdim=True), flat.amax(self.steps_of, keepdim=True)
        step = (other * (most - least) / (2**self.bits - 1)).to(self.scale_dtype)
        least = (other * least).to(self.scale_dtype)
        codes = (y / gauge.float() - least.float()) / step.float().masked_fill(step == 0, 1)
        codes = codes.round().clamp(0, 2**self.bits - 1).to(torch.uint8)
        scales = (gauge, torch.cat((step, least), dim=-2 if self.steps_of == -2 else -1))
        of_tokens, of_channels = scales if self.steps_of == -2 else scales[::-1]
        behind = of_channels.flatten(-2).unflatten(-1, (PAGE, -1))
        return pack_bits(codes, self.bits).flatten(-3, -2), torch.cat((of_tokens, behind), dim=-1).flatten(-3, -2)

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        self.check(dim)
        y = unpack_bits(codes, self.bits).unflatten(-2, (-1, PAGE)).float()
        of_token, of_channel = self._counts()
        tokens, behind = scale.unflatten(-2, (-1, PAGE)).float().split((of_token, self.scales(dim) - of_token), dim=-1)
        channels = behind.flatten(-2).unflatten(-1, (of_channel, dim))
        (step, least), gauge = (
            (channels.split(1, dim=-2), tokens) if self.steps_of == -2 else (tokens.split(1, dim=-1), channels)
        )
        y = ((y * step + least) * gauge).flatten(-3, -2)
        return y if rotation is None else y @ rotation.T

    def _counts(self) -> tuple[int, int]:
        """Returns the number of stored scales per token, and per channel."""
        return (1, 2) if self.steps_of == -2 else (2, 1)


class KVarNKeys(VarianceNormalisedRows):
    id, name, axes, bits, steps_of = CodecId.KVARN_4BIT, "kvarn-4bit", ("keys",), 4, -2


class KVarNValues(VarianceNormalisedRows):
    id, name, axes, bits, steps_of = CodecId.KVARN_2BIT, "kvarn-2bit", ("values",), 2, -1


def balance(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales of tokens [..., 64, 1] and of channels [..., 1, d] for tiles float32 [..., 64, d]. The caller
    divides a tile by both.

    The scales of the iteration with the least imbalance are returned. If no iteration improves a tile, it is only
    divided by its standard deviation. The imbalance is the largest divided by the smallest standard deviation of the
    tokens, plus the same ratio for the channels. The deviation of constant entries counts as 1.
    """
    unit = _deviation(tiles.flatten(-2), -1).unsqueeze(-1)
    tiles = tiles / unit
    of_token = torch.ones_like(tiles[..., :1])
    of_channel = torch.ones_like(tiles[..., :1, :])
    best, least = [of_token, of_channel], _imbalance(tiles)
    for _ in range(ITERATIONS):
        of_channel = (of_channel * _deviation(tiles / of_token / of_channel, -2)).clamp(*LIMITS)
        of_token = (of_token * _deviation(tiles / of_token / of_channel, -1)).clamp(*LIMITS)
        found = _imbalance(tiles / of_token / of_channel)
        best = [torch.where(found < least, new, old) for new, old in zip((of_token, of_channel), best, strict=True)]
        least = torch.minimum(least, found)
    return best[0], best[1] * unit


def _deviation(tiles: Tensor, axis: int) -> Tensor:
    """Standard deviations along ``axis``; 1 for constant entries."""
    found = tiles.std(axis, keepdim=True)
    return found.masked_fill(found < LEAST, 1)


def _imbalance(tiles: Tensor) -> Tensor:
    """The imbalance of each tile, [..., 1, 1]."""
    of_token, of_channel = (_deviation(tiles, axis) for axis in (-1, -2))
    of_token = of_token.amax(-2, keepdim=True) / of_token.amin(-2, keepdim=True)
    return of_token + of_channel.amax(-1, keepdim=True) / of_channel.amin(-1, keepdim=True)


def register() -> None:
    """Registers the codecs and the preset, with 4 bits for keys and 2 for values."""
    codecs.register(KVarNKeys())
    codecs.register(KVarNValues())
    presets.register("kvarn", KVSpec(keys="kvarn-4bit", values="kvarn-2bit"))
