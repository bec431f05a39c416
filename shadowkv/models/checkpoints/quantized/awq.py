"""AWQ (arXiv:2306.00978), packed for GEMM as AutoAWQ writes it (its ``awq/modules/linear/gemm.py``).

A weight has N rows, K columns, and G groups of columns. Its tensors are ``qweight``, int32 [K, N / 8], ``qzeros``,
int32 [G, N / 8], and ``scales`` [G, N]. A word has the 4-bit codes of eight neighbouring rows, in the order 0 2 4 6 1 3
5 7 from the lowest bits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shadowkv.models.checkpoints.quantized.format import Entry, Found, Read, expect, group_size, need, scale_dtype
from shadowkv.models.checkpoints.quantized.names import any_matches, list_of_names
from shadowkv.models.checkpoints.quantized.packing import pack, unpack
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import Form, QuantizedRows

_PARTS = ("qweight", "qzeros", "scales")
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight neighbouring rows: the position of its code in the word."""


class AWQ:
    """AWQ as a config describes it; raises ValueError for AutoAWQ's other packings."""

    method = "awq"
    dtypes = ("I32",)

    def __init__(self, stated: Mapping[str, Any]) -> None:
        bits, version = stated.get("bits", stated.get("w_bit", 4)), str(stated.get("version", "gemm")).lower()
        if bits != 4:
            raise ValueError(f"bits={bits} is not 4")
        if version != "gemm":
            raise ValueError(f"version={version[:60]!r} is not 'gemm'")
        size = stated.get("group_size", stated.get("q_group_size", 128))
        if type(size) is not int or not (size == -1 or size > 0):
            raise ValueError(f"group_size={str(size)[:60]} is not a number of columns, or -1")
        self._size = None if size == -1 else size
        self._plain = list_of_names(stated.get("modules_to_not_convert"), "modules_to_not_convert")

    def find(self, module: str, entries: Mapping[str, Entry], read: Read) -> Mapping[str, Found]:
        """As ``Format.find``."""
        if "qweight" not in entries:
            return {}
        qweight, qzeros, scales = need(entries, *_PARTS)
        if len(qweight.shape) != 2 or len(scales.shape) != 2:
            raise ValueError(f"qweight is {qweight} and scales are {scales}, which are not matrices")
        (columns, words), groups = qweight.shape, scales.shape[0]
        expect("qweight", qweight, (columns, words), "I32")
        expect("qzeros", qzeros, (groups, words), "I32")
        expect("scales", scales, (groups, 8 * words), scales.dtype)
        size = group_size(columns, groups, self._size)
        form = GroupForm("int4", size, scale_dtype("scales", scales), zeros=True)
        form.layout(columns)
        return {"weight": Found((8 * words, columns), form, _PARTS)}

    def read(self, weight: Found, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        """As ``Format.read``."""
        assert weight.form is not None
        codes, zeros = (_in_order(unpack(tensors[name], 4)).T for name in ("qweight", "qzeros"))
        return QuantizedRows((pack(codes, 4), tensors["scales"].T.contiguous(), zeros.contiguous()), weight.form)

    def planned(self, module: str) -> Form | None:
        """As ``Format.planned``."""
        if module == "lm_head" or any_matches(module, self._plain):
            return None
        return GroupForm("int4", self._size, torch.float16, zeros=True)


def _in_order(codes: Tensor) -> Tensor:
    """Codes [K, N] in packed order -> [K, N] in row order."""
    return codes.unflatten(1, (-1, 8))[:, :, _PLACES].flatten(1)
