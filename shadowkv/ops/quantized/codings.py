"""Quantized rows in the form that the kernels of the library humming take: one code per number, and scales of groups of
16 to 128 columns. ``quantized_matmul/humming.py`` packs these rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.ops.quantized.blocks import BlockForm, affine_parts
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import Form, QuantizedRows

MIN_GROUP, MAX_GROUP = 16, 128
"""Minimum and maximum number of columns that share a scale. Larger groups, and groups whose size is no power of two,
are divided into smaller ones with equal scales."""


@dataclass(frozen=True)
class Coding:
    """A format of rows with one code per number. A number is (code - zero point) · scale · factor.

    Attributes:
        element: type of the codes: ``uint4``, ``uint5``, ``uint6``, ``uint8``, ``e2m1`` or ``e4m3``. Integers have the
            middle of the codes as zero point, unless groups have zero points.
        group: columns that share a scale, a power of two; None if all columns of a row share one.
        scale: dtype to store the scales in; None for the dtype of activations.
        zeros: whether groups have zero points. These need not be whole numbers.
        factor: whether rows have a factor.
    """

    element: str
    group: int | None
    scale: torch.dtype | None = None
    zeros: bool = False
    factor: bool = False

    @property
    def bits(self) -> int:
        """Bits per code."""
        return {"e2m1": 4, "e4m3": 8}.get(self.element) or int(self.element.removeprefix("uint"))


@dataclass(frozen=True)
class Coded:
    """Rows in a coding.

    Attributes:
        codes: uint8 [N, K].
        scales: [N, G], in the dtype of the original form, or float32.
        zeros: float32 [N, G], or None.
        factor: float32 [N, 1], or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factor: Tensor | None = None


def coding(form: Form) -> Coding | None:
    """The coding of rows in ``form``; None if no coding represents them."""
    if isinstance(form, BlockForm):
        return _OF_BLOCKS.get(form.name)
    assert isinstance(form, GroupForm)
    group = form.group
    if group is not None:
        group = min(MAX_GROUP, group & -group)
        if group < MIN_GROUP:
            return None
    element = f"u{form.element}" if form.element.startswith("int") else form.element
    # Scales of 8 bits keep their dtype, unless a row has only one scale.
    scale = form.scale if form.scale.itemsize == 1 and group is not None else None
    return Coding(element, group, scale, form.zeros, form.factor)


def code(rows: QuantizedRows) -> Coded:
    """Converts rows [N, K] to the coding of their form, which must have one. Numbers change at most by rounding in
    float32."""
    found = coding(rows.form)
    assert found is not None, f"{rows.form.name} has no coding"
    if isinstance(rows.form, BlockForm):
        codes, scales, minima = affine_parts(rows.form, rows.tensors[0])
        return Coded(codes, scales) if minima is None else _with_zeros(codes, scales, minima, found)
    form, (codes, scales, *rest) = rows.form, rows.tensors
    assert isinstance(form, GroupForm)
    columns, codes = rows.columns, codes.view(torch.uint8)
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)

    def within(of_groups: Tensor) -> Tensor:
        if found.group is None or found.group == form.group:
            return of_groups
        assert form.group is not None
        return of_groups.repeat_interleave(form.group // found.group, 1)[:, : -(-columns // found.group)]

    zeros = within(rest[0]).float() if form.zeros else None
    return Coded(codes, within(scales), zeros, rest[-1] if form.factor else None)


def _with_zeros(codes: Tensor, scales: Tensor, minima: Tensor, found: Coding) -> Coded:
    """Converts numbers code · scale + minimum to (code - zero point) · scale.

    Zero points are stored in fewer bits than float32 has, and the smaller they are, the smaller is the rounding error.
    So if a zero point is above the middle of the codes, the group's codes are counted down from the highest. In groups
    with scale 0, all numbers equal the minimum: the minimum becomes the scale, with code 0 and zero point -1.
    """
    assert found.group is not None
    top, flat = 2**found.bits - 1, scales == 0
    zeros = -minima / torch.where(flat, 1, scales)
    turned = (zeros > top / 2) & ~flat
    scales, zeros = torch.where(turned, -scales, scales), torch.where(turned, top - zeros, zeros)
    scales, zeros = torch.where(flat, minima, scales), torch.where(flat, -1.0, zeros)
    grouped = codes.unflatten(1, (-1, found.group))
    grouped = torch.where(turned.unsqueeze(2), top - grouped, grouped)
    grouped = torch.where(flat.unsqueeze(2), 0, grouped)
    return Coded(grouped.flatten(1).to(torch.uint8), scales, zeros)


_OF_BLOCKS = {
    "Q4_0": Coding("uint4", 32),
    "Q4_1": Coding("uint4", 32, zeros=True),
    "Q8_0": Coding("uint8", 32),
    "Q4_K": Coding("uint4", 32, zeros=True),
    "Q5_K": Coding("uint5", 32, zeros=True),
    "Q6_K": Coding("uint6", 16),
}
