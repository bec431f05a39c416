"""4-bit floats, e2m1, with 8-bit scales. NVFP4's scales are floats, multiplied by one number per tensor; MXFP4's (OCP's
Microscaling Formats) are powers of two.

Both pack two codes per byte along a row, the first in the low half.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shadowkv.models.checkpoints.quantized.format import Entry, Found, expect, group_size, need
from shadowkv.models.checkpoints.safetensors_weights import FLOAT8
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import QuantizedRows

NVFP4 = GroupForm("e2m1", 16, torch.float8_e4m3fn, factor=True)
MXFP4 = GroupForm("e2m1", 32, torch.float8_e8m0fnu)


def find_fp4(entries: Mapping[str, Entry], form: GroupForm, codes: str, scales: str, factor: str | None) -> Found:
    """Finds a weight whose tensors have the names ``codes``, ``scales`` and ``factor``. ``factor`` is None for a form
    without a factor. Raises ValueError if the tensors do not fit."""
    names = (codes, scales) if factor is None else (codes, scales, factor)
    found = need(entries, *names)
    packed, scale = found[:2]
    if packed.dtype != "U8" or len(packed.shape) != 2 or len(scale.shape) != 2:
        raise ValueError(f"{codes} is {packed} and {scales} {scale}: not a U8 matrix with scales")
    (rows, width), groups = packed.shape, scale.shape[1]
    expect(scales, scale, (rows, groups), FLOAT8 if form.factor else "U8")
    if (size := group_size(2 * width, groups, form.group)) != form.group:
        raise ValueError(f"{scales} {scale.shape} has groups of {size or 2 * width} columns, not of {form.group}")
    if factor is not None:
        expect(factor, found[2], (1,) if len(found[2].shape) else (), "F32")
    return Found((rows, 2 * width), form, names)


def fp4_rows(form: GroupForm, codes: Tensor, scales: Tensor, factor: Tensor | None = None) -> QuantizedRows:
    """Returns N rows of K columns, whose codes are uint8 [N, K / 2]. ``scales``, uint8 or float8_e4m3fn [N, G], has a
    scale for each of G groups of columns. ``factor`` is one number that multiplies all scales; None for a form without
    a factor."""
    scales = scales.view(form.scale)
    if factor is None:
        return QuantizedRows((codes, scales), form)
    return QuantizedRows((codes, scales, factor.float().reshape(1, 1).expand(len(codes), 1)), form)
