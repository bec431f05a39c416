"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it (``qlinear_cuda_old.py`` in AutoGPTQ 0.7).

A weight has N rows, K columns, and G groups of columns. ``qweight``, int32 [K * bits / 32, N], packs several columns in
a word. ``qzeros``, int32 [G, N * bits / 32], packs several rows in a word. ``scales`` are [G, N], and ``g_idx`` [K] has
the group of every column. ``checkpoint_format`` ``gptq`` stores zero points minus one, ``gptq_v2`` stores them
unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shadowkv.models.checkpoints.quantized.format import Entry, Found, Read, expect, group_size, need, scale_dtype
from shadowkv.models.checkpoints.quantized.names import any_matches, list_of_names
from shadowkv.models.checkpoints.quantized.packing import in_any_order, in_order, unpack
from shadowkv.models.checkpoints.stored_weight import Stored
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import Form, QuantizedRows

_PARTS = ("qweight", "qzeros", "scales")
_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> number to add to stored zero points."""


class GPTQ:
    """GPTQ as a config describes it; raises ValueError for unsupported variants.

    A module's bits and group size are taken from its tensors, since GPTQModel's ``dynamic`` can override the config.
    """

    method = "gptq"
    dtypes = ("I32",)

    def __init__(self, stated: Mapping[str, Any]) -> None:
        form = str(stated.get("checkpoint_format") or stated.get("format") or "gptq").lower()
        if form not in _FORMATS:
            raise ValueError(f"checkpoint_format={form[:60]!r} is not one of {', '.join(_FORMATS)}")
        self._bits, size = stated.get("bits"), stated.get("group_size", -1)
        if self._bits not in (4, 8):
            raise ValueError(f"bits={str(self._bits)[:60]} is not 4 or 8")
        if type(size) is not int or not (size == -1 or size > 0):
            raise ValueError(f"group_size={str(size)[:60]} is not a number of columns, or -1")
        self._size, self._less = None if size == -1 else size, _FORMATS[form]
        self._symmetric, self._head = stated.get("sym", True) is True, stated.get("lm_head") is True
        self._plain = list_of_names(stated.get("modules_to_not_convert"), "modules_to_not_convert")

    def find(self, module: str, entries: Mapping[str, Entry], read: Read) -> Mapping[str, Found]:
        """As ``Format.find``."""
        if "qweight" not in entries:
            return {}
        qweight, qzeros, scales = need(entries, *_PARTS)
        if not len(qweight.shape) == len(qzeros.shape) == len(scales.shape) == 2:
            raise ValueError(f"qweight is {qweight}, qzeros are {qzeros} and scales are {scales}: not matrices")
        groups, rows = scales.shape
        bits = 32 * qzeros.shape[1] // max(1, rows)
        if bits not in (4, 8):
            raise ValueError(f"its zero points have {bits} bits, not 4 or 8: qzeros are {qzeros}, for {rows} rows")
        columns = qweight.shape[0] * 32 // bits
        expect("qweight", qweight, (qweight.shape[0], rows), "I32")
        expect("qzeros", qzeros, (groups, rows * bits // 32), "I32")
        size = group_size(columns, groups, self._size)
        dtype = scale_dtype("scales", scales)
        parts: tuple[str, ...] = _PARTS
        form: Form | None = GroupForm(f"int{bits}", size, dtype, zeros=not self._symmetric)
        if "g_idx" in entries:
            expect("g_idx", entries["g_idx"], (columns,), "I32", "I64")
            parts = (*parts, "g_idx")
            if not in_order(read("g_idx"), size or columns):
                form = None
        return {"weight": Found((rows, columns), form, parts)}

    def read(self, weight: Found, tensors: Mapping[str, Tensor]) -> Stored:
        """As ``Format.read``."""
        bits = tensors["qweight"].shape[0] * 32 // weight.shape[1]
        codes = tensors["qweight"].T.contiguous().view(torch.uint8)
        scales = tensors["scales"].T.contiguous()
        zeros = ((unpack(tensors["qzeros"], bits) + self._less) & (1 << bits) - 1).T.contiguous()
        if self._symmetric and (zeros != 1 << (bits - 1)).any():
            raise ValueError(
                f"the config says sym, but zero points are not all {1 << (bits - 1)}: {zeros.unique()[:9]}"
            )
        if weight.form is None:
            spread = unpack(codes.view(torch.int32), bits)
            return in_any_order(spread, zeros, scales, tensors["g_idx"], bits)
        return QuantizedRows((codes, scales) if self._symmetric else (codes, scales, zeros), weight.form)

    def planned(self, module: str) -> Form | None:
        """As ``Format.planned``."""
        if (module == "lm_head" and not self._head) or any_matches(module, self._plain):
            return None
        return GroupForm(f"int{self._bits}", self._size, torch.float16, zeros=not self._symmetric)
