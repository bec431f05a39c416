"""QJL (arXiv:2406.03482), as TQ35 and TQ25 of ``aither-kvcache`` 2.4 use it: rows have two groups of dimensions, and
each group is coded as levels and QJL's signs of the residual.

A row's residual is the row minus its levels. QJL codes the residual as its norm and the signs of its products with the
columns of a rotation. A row estimated from levels and residual is unbiased in every direction, whereas a row decoded
from levels alone is too short. With a rotation, the squared error of the estimate is pi / 2 - 1 = 0.571 of the
residual's squared norm. With the paper's Gaussian matrix in place of the rotation, the error is larger than the
residual.

The formats are here for comparison: ``lloyd-*`` rows of the same size are more accurate, and their products with
queries are also unbiased (``codecs/lloyd.py``). The bytes are those of the package. Decoding differs in one factor,
that of the signs (``kappa``): the package's factor is too small by sqrt(dimensions of the group), and the factor here
makes products with queries unbiased.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from shadowkv.kvcache import codecs
from shadowkv.kvcache.codecs.packing import Packing, pack_bits, unpack_bits
from shadowkv.kvcache.codecs.tables import Half, codebook, nearest
from shadowkv.ops.codec import CodecId, RowCodec
from shadowkv.ops.rotations import random_hadamard

SPHERE: dict[tuple[int, int], Half] = {
    (16, 2): (0.449957, 1.468826),
    (32, 2): (0.451428, 1.489560),
    (32, 3): (0.242405, 0.745325, 1.314996, 2.071926),
    (48, 1): (0.802051,),
    (64, 2): (0.452119, 1.499975),
    (64, 3): (0.243753, 0.750658, 1.329343, 2.111311),
    (96, 1): (0.799965,),
    (128, 2): (0.452453, 1.505193),
    (128, 3): (0.244425, 0.753330, 1.336599, 2.131471),
    (192, 1): (0.798924,),
}
"""The positive levels for the coordinates of a random unit row of d dimensions, times sqrt(d); the negative ones mirror
them. The dictionary's keys are d and the number of bits."""


class BigEndian(Packing):
    """Packs a row as one string of bits. A code begins with its highest bit, and a byte is filled from its highest bit.
    Codes of 3 bits can cross the border between two bytes. This is the order of TurboQuant in ``aither-kvcache``
    2.4."""

    def __init__(self, bits: int) -> None:
        self.bits, self.row_multiple = bits, 8 // math.gcd(8, bits)

    def pack(self, codes: Tensor) -> Tensor:
        places = torch.arange(self.bits - 1, -1, -1, dtype=torch.uint8, device=codes.device)
        bits = ((codes.unsqueeze(-1) >> places) & 1).flatten(-2)
        return pack_bits(bits.unflatten(-1, (-1, 8)).flip(-1).flatten(-2), 1)

    def unpack(self, packed: Tensor, dim: int) -> Tensor:
        bits = unpack_bits(packed, 1).unflatten(-1, (-1, 8)).flip(-1).flatten(-2).unflatten(-1, (dim, self.bits))
        places = torch.arange(self.bits - 1, -1, -1, dtype=torch.uint8, device=packed.device)
        return (bits << places).sum(-1, dtype=torch.uint8)


SIGN = BigEndian(1)
DIMS = (64, 128, 256)


class HybridRows(RowCodec):
    """Codes rows in two groups of dimensions: the first dimensions are the first group. The bytes of a group are its
    codes, the signs of its residual (both in the order of ``BigEndian``), its norm in float16, and its residual's norm
    in float16. A group is divided by its norm before it is coded, so its residual is that of a row of norm 1.

    Attributes:
        share: share of the dimensions in the first group.
        bits: bits of a code in the first group and in the second.
    """

    def __init__(self, id: int, name: str, share: float, bits: tuple[int, int]) -> None:
        self.id, self.name, self.share, self.bits = id, name, share, bits

    def wanted(self, dim: int) -> str | None:
        return None if dim in DIMS else f"one of {', '.join(map(str, DIMS))}"

    def row_bytes(self, dim: int) -> int:
        return sum(self._widths(dim))

    def scales(self, dim: int) -> int:
        return 0

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        dim = rows.shape[-1]
        self.check(dim)
        groups = rows.float().split(self._sizes(dim), dim=-1)
        codes = torch.cat([self._encode(group, bits) for group, bits in zip(groups, self.bits, strict=True)], dim=-1)
        return codes, torch.empty(*rows.shape[:-1], 0, dtype=self.scale_dtype, device=rows.device)

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        self.check(dim)
        groups = zip(codes.split(self._widths(dim), dim=-1), self._sizes(dim), self.bits, strict=True)
        return torch.cat([self._decode(*group) for group in groups], dim=-1)

    def _sizes(self, dim: int) -> list[int]:
        first = int(self.share * dim)
        return [first, dim - first]

    def _widths(self, dim: int) -> list[int]:
        return [size * (bits + 1) // 8 + 4 for size, bits in zip(self._sizes(dim), self.bits, strict=True)]

    def _encode(self, rows: Tensor, bits: int) -> Tensor:
        size = rows.shape[-1]
        levels, boundaries = codebook(SPHERE[size, bits], rows.device)
        norm = rows.norm(dim=-1, keepdim=True)
        unit = rows / norm.masked_fill(norm == 0, 1)
        matrix = _rotation(size, "levels", rows.device)
        codes = nearest(unit @ matrix * size**0.5, boundaries)
        rest = unit - levels[codes.int()] / size**0.5 @ matrix.T
        signs = signs_of(rest, _rotation(size, "signs", rows.device))
        norms = torch.cat((norm, rest.norm(dim=-1, keepdim=True)), dim=-1).half().view(torch.uint8)
        return torch.cat((BigEndian(bits).pack(codes), SIGN.pack(signs), norms), dim=-1)

    def _decode(self, packed: Tensor, size: int, bits: int) -> Tensor:
        levels, _ = codebook(SPHERE[size, bits], packed.device)
        codes, signs, norms = packed.split((size * bits // 8, size // 8, 4), dim=-1)
        norm, rest = norms.contiguous().view(torch.float16).float().split(1, dim=-1)
        matrix = _rotation(size, "levels", packed.device)
        unit = levels[BigEndian(bits).unpack(codes, size).int()] / size**0.5 @ matrix.T
        return norm * (unit + estimate(SIGN.unpack(signs, size), rest, _rotation(size, "signs", packed.device)))


@cache
def _rotation(size: int, name: str, device: torch.device) -> Tensor:
    """Returns a rotation [size, size]: random signs, then a Hadamard matrix.

    If the size is not a power of two, the matrix has a diagonal block for each power of two in the size, the largest
    first (96 = 64 + 32). As in the package, all blocks are divided by sqrt(size), although a block is a rotation only
    if divided by the root of its own size. So the matrix shortens rows of 96 dimensions, and products with TQ25's rows
    are 11 % too small.
    """
    blocks = [2**i for i in reversed(range(size.bit_length())) if size >> i & 1]
    matrices = [random_hadamard(block, name, rounds=1) * (block / size) ** 0.5 for block in blocks]
    return torch.block_diag(*matrices).to(device)


def kappa(dim: int) -> float:
    """Returns the factor that turns signs, rotated back, into the estimate of a residual of norm 1. For a Gaussian
    matrix the factor would be sqrt(pi / 2) / dim, because its rows are sqrt(dim) times as long as a rotation's."""
    return math.sqrt(math.pi / 2 / dim)


def signs_of(rest: Tensor, rotation: Tensor) -> Tensor:
    """Returns the signs uint8 [..., d] of the products of rows float32 [..., d] with the columns of a rotation [d, d]:
    1 if a product is at least 0, else 0."""
    return (rest @ rotation >= 0).to(torch.uint8)


def estimate(signs: Tensor, norm: Tensor, rotation: Tensor) -> Tensor:
    """Estimates rows float32 [..., d] from their ``signs_of`` uint8 [..., d] and their norms [..., 1]."""
    return kappa(signs.shape[-1]) * norm * ((2.0 * signs - 1) @ rotation.T)


HYBRID_ROWS = HybridRows(CodecId.TQ35, "tq35", 1 / 2, (3, 2)), HybridRows(CodecId.TQ25, "tq25", 1 / 4, (2, 1))


def register() -> None:
    """Registers the codecs."""
    for codec in HYBRID_ROWS:
        codecs.register(codec)
