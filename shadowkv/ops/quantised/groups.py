"""Rows of codes with a scale for every group of columns: integers and small floats as quantised checkpoints have them.

Codes of 4 bits are two a byte, the first in the low half. Block-wise scales of several rows are repeated for each of
them, and a scale of the whole tensor is a factor of each row: so rows can be cut and joined whatever they came from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

ELEMENTS = {"int4": 4, "int8": 8, "e2m1": 4, "e4m3": 8}
"""What codes can be, and their bits: integers from 0 on, whose zero point is their middle where groups have none of
their own, and floats (e2m1 of OCP's Microscaling Formats 1.0, e4m3 of arXiv:2209.05433)."""


@dataclass(frozen=True)
class GroupForm:
    """Codes, a scale for each group of columns, and what else a group and a row have.

    Rows of K numbers are stored in these tensors: codes, uint8 [N, K / 2] of 4 bits, uint8 or float8_e4m3fn [N, K] of 8
    bits; scales [N, G]; zero points, uint8 [N, G], where ``zeros``; a factor, float32 [N, 1], where ``factor``. A
    number is (code - zero point) · scale · factor. The last group may be cut off.

    Attributes:
        element: one of ``ELEMENTS``.
        group: columns that share a scale; None for all of a row.
        scale: dtype of the scales.
        zeros: integers have a zero point for each group.
        factor: scales are themselves scaled, by one number a row.
    """

    element: str
    group: int | None
    scale: torch.dtype
    zeros: bool = False
    factor: bool = False

    def __post_init__(self) -> None:
        assert self.element in ELEMENTS, f"{self.element} is not one of {', '.join(ELEMENTS)}"
        assert not (self.zeros and not self.element.startswith("int")), "floats have no zero points"

    @property
    def name(self) -> str:
        """As in ``int4-g128``, groups of 128; without a number scales are one a row, or of the format's own groups."""
        own = {"e4m3": ("fp8", None), "e2m1": ("nvfp4", 16) if self.factor else ("mxfp4", 32)}
        element, group = own.get(self.element, (self.element, None))
        return element if self.group == group else f"{element}-g{self.group}"

    @property
    def bits(self) -> int:
        """Of a code."""
        return ELEMENTS[self.element]

    def groups(self, columns: int) -> int:
        """G, the scales of a row."""
        return 1 if self.group is None else -(-columns // self.group)

    def layout(self, columns: int) -> tuple[tuple[int, torch.dtype], ...]:
        """As ``Form.layout``."""
        if columns * self.bits % 8:
            raise ValueError(f"{self.name} are two a byte, and rows have {columns}")
        codes = torch.float8_e4m3fn if self.element == "e4m3" else torch.uint8
        groups = self.groups(columns)
        zeros, factor = [(groups, torch.uint8)] * self.zeros, [(1, torch.float32)] * self.factor
        return ((columns * self.bits // 8, codes), (groups, self.scale), *zeros, *factor)

    def columns(self, tensors: tuple[Tensor, ...]) -> int:
        """As ``Form.columns``."""
        columns = tensors[0].shape[1] * 8 // self.bits
        found = tuple((tensor.shape[1], tensor.dtype) for tensor in tensors)
        if found != self.layout(columns):
            raise ValueError(f"{self.name} of {columns} columns are stored as {self.layout(columns)}, not as {found}")
        return columns

    def unpack(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """As ``Form.unpack``."""
        (codes, scales, *rest), columns = tensors, self.columns(tensors)
        scale = scales.float()
        if self.factor:
            scale = scale * rest[-1]
        numbers = self._numbers(codes)
        if columns % scale.shape[1] == 0 and columns // scale.shape[1] == (self.group or columns):
            grouped = numbers.view(len(codes), scale.shape[1], -1)
            if self.zeros:
                grouped -= rest[0].unsqueeze(2)
            return grouped.mul_(scale.unsqueeze(2)).view(len(codes), columns)
        if self.zeros:
            numbers -= self._spread(rest[0], columns)
        return numbers.mul_(self._spread(scale, columns))

    def cut_form(self, columns: int, start: int, stop: int) -> GroupForm | None:
        """As ``Form.cut_form``: groups that a border cuts become smaller ones, with the same scales."""
        if start * self.bits % 8 or stop * self.bits % 8:
            return None
        return self if self.group is None else replace(self, group=self._fitting(columns, start, stop))

    def cut(self, tensors: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
        """As ``Form.cut``."""
        (codes, scales, *rest), columns = tensors, self.columns(tensors)
        codes = codes[:, start * self.bits // 8 : stop * self.bits // 8]
        if self.group is None:
            return (codes, scales, *rest)
        size = self._fitting(columns, start, stop)
        groups = slice(start // size, -(-stop // size))

        def within(of_groups: Tensor) -> Tensor:
            assert self.group is not None
            return of_groups.repeat_interleave(self.group // size, 1)[:, groups]

        zeros = [within(rest[0])] if self.zeros else []
        return (codes, within(scales), *zeros, *rest[len(zeros) :])

    def _fitting(self, columns: int, start: int, stop: int) -> int:
        """The largest groups that begin at ``start`` and, unless that is the end of the row, end at ``stop``."""
        assert self.group is not None
        return gcd(self.group, start, 0 if stop == columns else stop)

    def _numbers(self, codes: Tensor) -> Tensor:
        """What codes [N, B] stand for, before zero points of their own and scales: a new float32 [N, K].

        By arithmetic on bits, which is several times as fast on a CPU as tables, or as PyTorch's conversion of e4m3:
        small floats are placed as those of float16 are, whose exponents are larger by a constant.
        """
        if self.element == "e4m3":
            bits, magnitude = codes.view(torch.int8).short(), codes.view(torch.uint8) & 0x7F
            bits <<= 7  # the sign is in all bits above the exponent
            bits &= ~0x4000
            numbers = bits.view(torch.float16).float().mul_(2.0**8)
            if len(codes) and magnitude.amax() == 0x7F:
                numbers.masked_fill_(magnitude == 0x7F, torch.nan)
            return numbers
        if self.bits == 4:
            pairs = codes.contiguous().short()
            codes = ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)  # the low half comes first
        if self.element == "e2m1":
            bits = codes.short()
            bits <<= 12
            bits >>= 3  # fills the places above the exponent with the sign
            bits &= ~0x7000
            return bits.view(torch.float16).float().mul_(2.0**14)
        numbers = codes.float()
        return numbers if self.zeros else numbers.sub_(1 << (self.bits - 1))

    def _spread(self, of_groups: Tensor, columns: int) -> Tensor:
        """[N, G] -> [N, K]."""
        return of_groups.repeat_interleave(self.group or columns, 1)[:, :columns]
