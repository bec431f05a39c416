"""Quantized rows with a scale for each group of columns: the integers and small floats of quantized checkpoints.

Two codes of 4 bits share a byte, the first in the low half. A scale that several rows share is repeated for each row,
and a scale of a whole tensor becomes a factor of each row. So rows of any checkpoint can be cut and joined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

ELEMENTS = {"int4": 4, "int8": 8, "e2m1": 4, "e4m3": 8}
"""Types of codes, and their bits. Codes of integers start at 0. The middle of the codes is the zero point, unless
groups have zero points. Floats are e2m1 of OCP's Microscaling Formats 1.0 and e4m3 of arXiv:2209.05433."""


@dataclass(frozen=True)
class GroupForm:
    """A format with codes and a scale for each group of columns. A number is (code - zero point) · scale · factor.

    N rows of K numbers are stored in up to four tensors: codes, uint8 [N, K / 2] for 4 bits, uint8 or float8_e4m3fn [N,
    K] for 8 bits; scales [N, G]; zero points, uint8 [N, G], with ``zeros``; and factors, float32 [N, 1], with
    ``factor``. The last group may have fewer columns.

    Attributes:
        element: one of ``ELEMENTS``.
        group: columns that share a scale; None if all columns of a row share one.
        scale: dtype of the scales.
        zeros: whether groups of integers have zero points.
        factor: whether rows have a factor.
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
        """The form's name for messages. ``int4-g128`` has groups of 128. A name without a number means that a row has
        one scale, or that groups have the size that the element's format defines (``mxfp4``, ``nvfp4``)."""
        own = {"e4m3": ("fp8", None), "e2m1": ("nvfp4", 16) if self.factor else ("mxfp4", 32)}
        element, group = own.get(self.element, (self.element, None))
        return element if self.group == group else f"{element}-g{self.group}"

    @property
    def bits(self) -> int:
        """Bits per code."""
        return ELEMENTS[self.element]

    def groups(self, columns: int) -> int:
        """G, the number of scales of a row."""
        return 1 if self.group is None else -(-columns // self.group)

    def layout(self, columns: int) -> tuple[tuple[int, torch.dtype], ...]:
        """As ``Form.layout``."""
        if columns * self.bits % 8:
            raise ValueError(f"{self.name} stores two numbers per byte, so rows cannot have {columns} numbers")
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
        """As ``Form.cut_form``. If ``start`` or ``stop`` is within a group, groups are divided into smaller ones, which
        repeat the scales."""
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
        """Returns the largest group size that fits columns ``start`` to ``stop``. Groups of this size do not cross
        borders of this form's groups. They have a border at ``start`` and at ``stop``, unless ``stop`` is the end of
        the row."""
        assert self.group is not None
        return gcd(self.group, start, 0 if stop == columns else stop)

    def _numbers(self, codes: Tensor) -> Tensor:
        """Converts codes [N, B] to a new float32 [N, K], to which zero points and scales of groups are not yet applied.

        On a CPU, arithmetic on bits is several times as fast as tables or as PyTorch's conversion of e4m3. A float of 4
        or 8 bits is shifted to its place in a float16. The exponents differ by a constant, so a multiplication gives
        the value.
        """
        if self.element == "e4m3":
            bits, magnitude = codes.view(torch.int8).short(), codes.view(torch.uint8) & 0x7F
            bits <<= 7  # the bits above the exponent all have the sign
            bits &= ~0x4000
            numbers = bits.view(torch.float16).float().mul_(2.0**8)
            if len(codes) and magnitude.amax() == 0x7F:
                numbers.masked_fill_(magnitude == 0x7F, torch.nan)
            return numbers
        if self.bits == 4:
            pairs = codes.contiguous().short()
            codes = ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)  # the first code is in the low half
        if self.element == "e2m1":
            bits = codes.short()
            bits <<= 12
            bits >>= 3  # fills the bits above the exponent with the sign
            bits &= ~0x7000
            return bits.view(torch.float16).float().mul_(2.0**14)
        numbers = codes.float()
        return numbers if self.zeros else numbers.sub_(1 << (self.bits - 1))

    def _spread(self, of_groups: Tensor, columns: int) -> Tensor:
        """Repeats [N, G] for the columns of each group, [N, K]."""
        return of_groups.repeat_interleave(self.group or columns, 1)[:, :columns]
