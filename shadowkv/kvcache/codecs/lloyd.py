"""Rotated rows coded with the optimal quantizer of a Gaussian (TurboQuant, arXiv:2504.19874).

After a rotation the entries of any unit row are nearly Gaussian with deviation 1 / sqrt(d). A row is stored as levels
and one scale. The best scale depends on the use of the row. With the row's norm as the scale, products with queries are
1 % too small at 4 bits, 3 % at 3 bits and 12 % at 2 bits, which flattens the logits of keys. So the scale of keys makes
products unbiased, and the scale of values minimises the squared error.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from shadowkv.kvcache.codecs.packing import Lanes, Packing, SelectorLanes
from shadowkv.kvcache.codecs.tables import GAUSSIAN, Half, codebook, constant, mirrored, nearest, of_bytes
from shadowkv.ops.codec import CodecId, LevelRows
from shadowkv.ops.rotations import random_hadamard, random_rotation

Rule = Callable[[Tensor, Tensor], Tensor]
"""Computes scales [..., 1] from unit rows [..., d] and their levels [..., d]. Scales of zero rows are arbitrary."""


def norm(rows: Tensor, levels: Tensor) -> Tensor:
    """Returns 1: the scale is the row's norm, as if the levels had norm 1 (TurboQuant)."""
    return torch.ones_like(rows[..., :1])


def least_squares(rows: Tensor, levels: Tensor) -> Tensor:
    """Returns the scale that minimises the squared error of the decoded row."""
    return (rows * levels).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)


def unbiased(rows: Tensor, levels: Tensor) -> Tensor:
    """Returns the scale with which the product of the decoded row and the original row is the original's squared norm.
    Products with any query are then unbiased."""
    return (rows * levels).sum(-1, keepdim=True).reciprocal()


class LloydRows(LevelRows):
    """Rows of levels with one scale each. A decoded row is levels / sqrt(d) times the scale.

    The scale is the row's norm times the result of ``rule``, and 0 for a zero row. A NaN in a row makes the whole row
    NaN. A float16 scale is at most 65504; below 1e-5 its steps of 6e-8 add to the error.

    Attributes:
        bits: bits of a code, 1 to 8.
        half: the positive levels, ascending.
        levels: the level of each code, in ascending order; with ``signed``, the positive levels come first and then
            their negatives, so that the highest bit of a code is the sign.
        packing: order of codes in bytes.
        rule: rule for scales.
        rule_of_keys: rule for scales of keys; None uses ``rule`` for keys too.
        rotation: makes the orthogonal matrix from the number of dimensions and a name.
        steps: for kernels that multiply levels as integers, the number of steps in the largest level. Every level is
            rounded to an odd multiple of a step. None if no kernel multiplies these levels as integers.
    """

    def __init__(
        self,
        id: int,
        name: str,
        packing: Packing,
        rule: Rule = least_squares,
        rule_of_keys: Rule | None = unbiased,
        rotation: Callable[[int, str], Tensor] = random_rotation,
        scale_dtype: torch.dtype = torch.float16,
        half: Half | None = None,
        signed: bool = False,
        steps: int | None = None,
    ) -> None:
        self.id, self.name, self.scale_dtype, self.signed = id, name, scale_dtype, signed
        self.half, self.steps = GAUSSIAN[packing.bits] if half is None else half, steps
        self.levels = (*self.half, *(-level for level in self.half)) if signed else mirrored(self.half)
        self.bits, self.packing, self.row_multiple = packing.bits, packing, packing.row_multiple
        self.rule, self.rule_of_keys, self.rotation = rule, rule_of_keys, rotation

    @property
    def scale_rule(self) -> str:
        return self.rule.__name__

    def for_axis(self, axis: str) -> LloydRows:
        if axis != "keys" or self.rule_of_keys is None:
            return self
        codec = copy(self)
        codec.rule = self.rule_of_keys
        return codec

    def wanted(self, dim: int) -> str | None:
        if self.rotation is random_hadamard and dim & (dim - 1):
            return "a power of two"
        return super().wanted(dim)

    def rotation_matrix(self, dim: int, name: str) -> Tensor:
        return self.rotation(dim, name)

    def row_bytes(self, dim: int) -> int:
        return self.packing.row_bytes(dim)

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        dim = rows.shape[-1]
        self.check(dim)
        y = rows.float() if rotation is None else rows.float() @ rotation
        length = y.norm(dim=-1, keepdim=True)
        unit = y / length.masked_fill(length == 0, 1)
        levels, boundaries = codebook(self.half, rows.device)
        codes = nearest(unit * dim**0.5, boundaries)
        scale = length * self.rule(unit, levels[codes.int()] / dim**0.5)
        if self.signed:
            codes = torch.where(codes < len(self.half), len(levels) - 1 - codes, codes - len(self.half))
        return self.packing.pack(codes), scale.masked_fill(length == 0, 0).to(self.scale_dtype)

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        self.check(dim)
        levels = constant(self.levels, codes.device)
        y = levels[self.packing.unpack(codes, dim).int()] / dim**0.5 * scale.float()
        return y if rotation is None else y @ rotation.T

    def code_levels(self, dim: int, device: torch.device) -> Tensor:
        return constant(self.levels, device) / dim**0.5

    def whole_levels(self, dim: int) -> tuple[tuple[int, ...], float] | None:
        if self.steps is None:
            return None
        step = self.half[-1] / self.steps
        return tuple(2 * round((level / step - 1) / 2) + 1 for level in self.levels), step / dim**0.5

    def upper_places(self, dim: int) -> tuple[int, ...]:
        if not isinstance(self.packing, Lanes):
            raise ValueError(f"codes of {self.name!r} do not lie in lanes")
        return self.packing.upper_places(dim)


LLOYD_ROWS = {
    8: LloydRows(CodecId.LLOYD_8BIT, "lloyd-8bit", Lanes(8)),
    4: LloydRows(CodecId.LLOYD_4BIT, "lloyd-4bit", Lanes(4), half=of_bytes(GAUSSIAN[4]), signed=True, steps=255),
    3: LloydRows(CodecId.LLOYD_3BIT, "lloyd-3bit", SelectorLanes(), half=of_bytes(GAUSSIAN[3]), steps=255),
    2: LloydRows(CodecId.LLOYD_2BIT, "lloyd-2bit", Lanes(2), half=of_bytes(GAUSSIAN[2]), steps=255),
}
"""Codecs by bits. The CUDA kernel of attention to all tokens reads the levels of 4-, 3- and 2-bit codes as bytes
(``tables.of_bytes``). Rounding levels to bytes adds less than 0.5 % to the distortion."""
