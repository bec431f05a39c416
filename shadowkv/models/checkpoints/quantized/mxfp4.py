"""MXFP4 of gpt-oss (``integrations/mxfp4.py`` in transformers). The weights of E experts, each of N rows and K columns,
are in ``NAME_blocks``, uint8 [E, N, K / 32, 16], and ``NAME_scales``, uint8 [E, N, K / 32]. A scale s is stored as
log2(s) + 127."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shadowkv.models.checkpoints.quantized.format import Entry, Found, Read, expect, need
from shadowkv.models.checkpoints.quantized.fp4 import MXFP4, fp4_rows
from shadowkv.models.checkpoints.quantized.names import list_of_names
from shadowkv.ops.quantized.rows import Form, QuantizedRows

_BLOCKS, _SCALES = "_blocks", "_scales"


class MXFP4Experts:
    """MXFP4 experts as a config describes them."""

    method = "mxfp4"
    dtypes = ("U8",)

    def __init__(self, stated: Mapping[str, Any]) -> None:
        list_of_names(stated.get("modules_to_not_convert"), "modules_to_not_convert")

    def find(self, module: str, entries: Mapping[str, Entry], read: Read) -> Mapping[str, Found]:
        """As ``Format.find``: the tensor ``NAME_blocks`` belongs to the weight ``NAME``."""
        found = {}
        for name in entries:
            if not name.endswith(_BLOCKS):
                continue
            weight = name.removesuffix(_BLOCKS)
            blocks, scales = need(entries, name, weight + _SCALES)
            if len(blocks.shape) != 4:
                raise ValueError(f"{name} is {blocks}, not of four dimensions")
            experts, rows, groups, _ = blocks.shape
            expect(name, blocks, (experts, rows, groups, 16), "U8")
            expect(weight + _SCALES, scales, (experts, rows, groups), "U8")
            found[weight] = Found((experts, rows, 32 * groups), MXFP4, (name, weight + _SCALES))
        return found

    def read(self, weight: Found, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        """As ``Format.read``: the rows of all experts follow one another."""
        blocks, scales = (tensors[name] for name in weight.parts)
        return fp4_rows(MXFP4, blocks.flatten(2).flatten(0, 1), scales.flatten(0, 1))

    def planned(self, module: str) -> Form | None:
        """As ``Format.planned``: only experts are quantized."""
        return MXFP4 if ".experts." in module else None
