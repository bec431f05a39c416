"""Rows of codes with a scale for every group of columns: integers and small floats as quantised checkpoints have them.

Codes of 4 bits are two a byte, the first in the low half. Block-wise scales of several rows are repeated for each of
them, and a scale of the whole tensor is a factor of each row: so rows can be cut and joined whatever they came from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 (OCP Microscaling Formats 1.0, section 5.3.3); the fourth bit is the sign."""

ELEMENTS = {"int4": 4, "int8": 8, "e2m1": 4, "e4m3": 8}
"""What codes can be, and their bits: integers from 0 on, whose zero point is their middle where groups have none of
their own, and floats."""


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
        """In words, for messages."""
        return (
            f"{self.element} with a scale a row" if self.group is None else f"{self.element} in groups of {self.group}"
        )

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
        """What codes [N, B] stand for, before zero points of their own and scales: a new float32 [N, K]."""
        if self.element == "e4m3":
            return codes.float()
        if self.element == "int8":
            return codes.float() if self.zeros else codes.float().sub_(128)
        pairs = _pairs(self.element, self.zeros, codes.device)
        return F.embedding(codes.int(), pairs).flatten(1)

    def _spread(self, of_groups: Tensor, columns: int) -> Tensor:
        """[N, G] -> [N, K]."""
        return of_groups.repeat_interleave(self.group or columns, 1)[:, :columns]


@cache
def _pairs(element: str, zeros: bool, device: torch.device) -> Tensor:
    """The two numbers of each byte: float32 [256, 2]."""
    magnitudes = torch.tensor(FP4)
    of_code = torch.cat((magnitudes, -magnitudes)) if element == "e2m1" else torch.arange(16.0) - (0 if zeros else 8)
    byte = torch.arange(256)
    return torch.stack((of_code[byte & 15], of_code[byte >> 4]), 1).to(device)
