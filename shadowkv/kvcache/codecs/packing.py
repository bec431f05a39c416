"""Packings: how codes of up to 8 bits are arranged in bytes. Codecs use them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor


def pack_bits(codes: Tensor, width: int) -> Tensor:
    """Packs codes uint8 [..., n] of ``width`` bits into bytes uint8 [..., n width / 8]. The first code of a byte is in
    its lowest bits.

    ``width`` divides 8, and the number of codes per byte divides n.
    """
    places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return (codes.unflatten(-1, (-1, 8 // width)) << places).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, width: int) -> Tensor:
    """Returns the codes uint8 [..., n] that ``pack_bits`` has packed."""
    places = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & (2**width - 1)).flatten(-2)


class Packing(ABC):
    """An arrangement of codes in bytes.

    Attributes:
        bits: bits of a code.
        row_multiple: the number of codes in a row must be a multiple of this.
    """

    bits: int
    row_multiple: int

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of ``dim`` codes."""
        return dim * self.bits // 8

    @abstractmethod
    def pack(self, codes: Tensor) -> Tensor:
        """Packs codes uint8 [..., d] into bytes uint8 [..., row_bytes]."""

    @abstractmethod
    def unpack(self, packed: Tensor, dim: int) -> Tensor:
        """Unpacks bytes uint8 [..., row_bytes] into codes uint8 [..., dim]."""


class Lanes(Packing):
    """The order in which the CUDA attention kernel reads rows, with its threads in groups of 8.

    Dimension 16 i + 8 half + g belongs to lane g = 0 .. 7, and the bytes of a lane are contiguous. A byte holds, from
    its low bits up, the codes of one i at 4 bits (half 0, half 1), or of two consecutive i at 2 bits. At 3 bits, the
    plane of the lower two bits of all lanes comes first. The plane of the upper bits follows, with four consecutive i
    in a byte.

    Args:
        planes: number of bits in each plane of a code, the lowest bits first.
    """

    def __init__(self, *planes: int) -> None:
        self.planes, self.bits, self.row_multiple = planes, sum(planes), 64 // min(planes)

    def pack(self, codes: Tensor) -> Tensor:
        lanes = codes.unflatten(-1, (-1, 8)).transpose(-1, -2)  # [..., g, 2 i + half]
        planes, shift = [], 0
        for width in self.planes:
            planes.append(pack_bits((lanes >> shift) & (2**width - 1), width).flatten(-2))
            shift += width
        return torch.cat(planes, dim=-1)

    def unpack(self, packed: Tensor, dim: int) -> Tensor:
        lanes = packed.new_zeros(*packed.shape[:-1], 8, dim // 8)
        shift = 0
        for width, plane in zip(self.planes, packed.split([dim * width // 8 for width in self.planes], dim=-1)):
            lanes |= unpack_bits(plane.unflatten(-1, (8, -1)), width) << shift
            shift += width
        return lanes.transpose(-1, -2).flatten(-2)

    def upper_places(self, dim: int) -> tuple[int, ...]:
        """For each of a lane's dim / 8 codes, the position of its highest bit in the lane's bytes of the last plane."""
        return _upper_places(self, dim)


@cache  # every call of a kernel needs this
def _upper_places(packing: Lanes, dim: int) -> tuple[int, ...]:
    """Finds the positions by packing one code at a time."""
    highest = torch.zeros(dim // 8, dim, dtype=torch.uint8)
    highest[range(dim // 8), range(0, dim, 8)] = 1 << packing.bits - 1
    plane = packing.pack(highest)[:, dim * (packing.bits - packing.planes[-1]) // 8 :]
    return tuple(unpack_bits(plane, 1).argmax(-1).tolist())


class SelectorLanes(Lanes):
    """``Lanes(2, 1)`` with another order of the plane of upper bits.

    The CUDA kernel of attention to all tokens makes selectors of byte permutations from this plane. Of 16 consecutive
    codes of a lane, number 8 h + 2 k + r has its upper bit at 4 k + 2 h + r. If d is not a multiple of 128, lanes have
    partial groups of 16 and the order is that of ``Lanes(2, 1)``.
    """

    def __init__(self) -> None:
        super().__init__(2, 1)

    def pack(self, codes: Tensor) -> Tensor:
        return super().pack(self._moved(codes))

    def unpack(self, packed: Tensor, dim: int) -> Tensor:
        return self._moved(super().unpack(packed, dim), back=True)

    @staticmethod
    def _moved(codes: Tensor, back: bool = False) -> Tensor:
        """Moves the upper bits of codes from the order of ``Lanes(2, 1)`` to the order of this class, or back."""
        if codes.shape[-1] % 128:
            return codes
        shape = (-1, 4, 2, 2, 8) if back else (-1, 2, 4, 2, 8)  # groups of 16; k, h or h, k; r; lanes
        upper = (codes & 4).unflatten(-1, shape).transpose(-3, -4).flatten(-5)
        return codes & 3 | upper
