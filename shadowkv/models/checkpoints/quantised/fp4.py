"""Floats of 4 bits, e2m1, with scales in 8 bits: of NVFP4 floats, times one number of the tensor, and of MXFP4 (OCP's
Microscaling Formats) powers of two.

Both are two a byte along a row, the first in the low half.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shadowkv.models.checkpoints.quantised.format import FLOAT8, Entry, Found, expect, group_size, need
from shadowkv.ops.quantised.groups import GroupForm
from shadowkv.ops.quantised.rows import QuantisedRows

NVFP4 = GroupForm("e2m1", 16, torch.float8_e4m3fn, factor=True)
MXFP4 = GroupForm("e2m1", 32, torch.float8_e8m0fnu)


def find_fp4(entries: Mapping[str, Entry], form: GroupForm, codes: str, scales: str, factor: str | None) -> Found:
    """A weight of tensors with these names; raises ValueError where they do not fit."""
    names = (codes, scales) if factor is None else (codes, scales, factor)
    found = need(entries, *names)
    packed, scale = found[:2]
    if packed.dtype != "U8" or len(packed.shape) != 2 or len(scale.shape) != 2:
        raise ValueError(f"{codes} is {packed} and {scales} {scale}: no U8 matrix with scales")
    (rows, width), groups = packed.shape, scale.shape[1]
    expect(scales, scale, (rows, groups), FLOAT8 if form.factor else "U8")
    if (size := group_size(2 * width, groups, form.group)) != form.group:
        raise ValueError(f"{scales} {scale.shape} has groups of {size or 2 * width} columns, not of {form.group}")
    if factor is not None:
        expect(factor, found[2], (1,) if len(found[2].shape) else (), "F32")
    return Found((rows, 2 * width), form, names)


def fp4_rows(form: GroupForm, codes: Tensor, scales: Tensor, factor: Tensor | None = None) -> QuantisedRows:
    """Codes, uint8 [N, K / 2], with scales, uint8 or float8_e4m3fn [N, G], and what these are multiplied by: one number
    for all rows."""
    scales = scales.view(form.scale)
    if factor is None:
        return QuantisedRows((codes, scales), form)
    return QuantisedRows((codes, scales, factor.float().reshape(1, 1).expand(len(codes), 1)), form)
