"""TQ35 and TQ25 of ``aither-kvcache`` 2.4: two groups of dimensions, each coded as levels and QJL's signs of the
residual.

They are here for comparison: ``lloyd-*`` rows of the same size are closer, and their products are also unbiased
(``lloyd.py``). The bytes mean the same as in the package, except for the weight of signs. There it is too small by a
factor of sqrt(group); here it makes products unbiased (``qjl.py``).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.kvcache.codecs import qjl
from shadowkv.kvcache.codecs.packing import BigEndian
from shadowkv.kvcache.codecs.tables import SPHERE, codebook, nearest
from shadowkv.ops.codec import CodecId, RowCodec
from shadowkv.ops.rotations import random_hadamard

SIGN = BigEndian(1)
DIMS = (64, 128, 256)


class HybridRows(RowCodec):
    """The bytes of a group are its codes, highest bits first, its signs in the same order, its norm in float16, and the
    norm of the unit row's residual in float16. The first dimensions of a row are the first group.

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
        signs = qjl.signs(rest, _rotation(size, "signs", rows.device))
        norms = torch.cat((norm, rest.norm(dim=-1, keepdim=True)), dim=-1).half().view(torch.uint8)
        return torch.cat((BigEndian(bits).pack(codes), SIGN.pack(signs), norms), dim=-1)

    def _decode(self, packed: Tensor, size: int, bits: int) -> Tensor:
        levels, _ = codebook(SPHERE[size, bits], packed.device)
        codes, signs, norms = packed.split((size * bits // 8, size // 8, 4), dim=-1)
        norm, rest = norms.contiguous().view(torch.float16).float().split(1, dim=-1)
        matrix = _rotation(size, "levels", packed.device)
        unit = levels[BigEndian(bits).unpack(codes, size).int()] / size**0.5 @ matrix.T
        return norm * (unit + qjl.estimate(SIGN.unpack(signs, size), rest, _rotation(size, "signs", packed.device)))


@cache
def _rotation(size: int, name: str, device: torch.device) -> Tensor:
    """A rotation [size, size] of random signs and a Hadamard matrix.

    A size that is not a power of two has a block for each power of two in its sum, the largest first. As in the
    package, all blocks are divided by sqrt(size). This shortens rows of 96, so products with TQ25's rows are 11 % too
    small.
    """
    blocks = [2**i for i in reversed(range(size.bit_length())) if size >> i & 1]
    matrices = [random_hadamard(block, name, rounds=1) * (block / size) ** 0.5 for block in blocks]
    return torch.block_diag(*matrices).to(device)


HYBRID_ROWS = (HybridRows(CodecId.TQ35, "tq35", 1 / 2, (3, 2)), HybridRows(CodecId.TQ25, "tq25", 1 / 4, (2, 1)))
