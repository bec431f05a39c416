"""8-bit floats, float8_e4m3fn, with one scale per tensor, per row or per block: Hugging Face's ``fp8`` and
``fbgemm_fp8``.

Qwen3's and DeepSeek's files have blocks (``finegrained_fp8.py`` in transformers). Other formats use the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shadowkv.models.checkpoints.quantized.format import SCALE_DTYPES, Entry, Found, Read
from shadowkv.models.checkpoints.quantized.names import any_matches, list_of_names
from shadowkv.models.checkpoints.safetensors_weights import FLOAT8
from shadowkv.models.checkpoints.stored_weight import FP8_ROWS
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import Form, QuantizedRows

Block = tuple[int, int]
"""Numbers of rows and columns of a block, which shares a scale."""

SCALES = ("weight_scale", "weight_scale_inv")
"""Names of scales beside ``weight``. Codes are multiplied by the scale, whichever name it has: an "inv" scale is the
inverse of the quantizer's scale."""

E8M0 = "F8_E8M0"
"""safetensors' name of scales that are powers of two."""


class FP8:
    """The format as a config describes it; raises ValueError for other 8-bit floats.

    Static scales of activations in the files are not used. If activations are quantized, each token's scale is computed
    from the token's maximum, which is more accurate.
    """

    dtypes = (FLOAT8, E8M0)

    def __init__(self, stated: Mapping[str, Any]) -> None:
        self.method = str(stated["quant_method"])
        form = stated.get("fmt", "e4m3")
        if self.method == "fp8" and form not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"fmt={str(form)[:60]} is neither e4m3 nor float8_e4m3fn")
        self._block = block_of(stated.get("weight_block_size"), "weight_block_size")
        self._plain = list_of_names(stated.get("modules_to_not_convert"), "modules_to_not_convert")

    def find(self, module: str, entries: Mapping[str, Entry], read: Read) -> Mapping[str, Found]:
        """As ``Format.find``."""
        return find_float8(module, entries, self._block)

    def read(self, weight: Found, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        """As ``Format.read``."""
        return read_float8(weight, tensors, self._block)

    def planned(self, module: str) -> Form | None:
        """As ``Format.planned``."""
        return None if module == "lm_head" or any_matches(module, self._plain) else float8_form(self._block)


def block_of(size: Any, name: str) -> Block | None:
    """Returns a config's block size, or None if the config has none; raises ValueError if the size is invalid."""
    if size is None:
        return None
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        return size[0], size[1]
    raise ValueError(f"{name}={str(size)[:60]} is not two numbers, rows and columns of a block")


def float8_form(block: Block | None) -> GroupForm:
    """Returns the form of weights with one scale per ``block``; a block's scale is repeated for each of its rows. If
    ``block`` is None, returns the form of weights with one scale per row."""
    return FP8_ROWS if block is None else GroupForm("e4m3", block[1], torch.float32)


def find_float8(module: str, entries: Mapping[str, Entry], block: Block | None) -> dict[str, Found]:
    """Does what ``Format.find`` does, for a weight with one scale per tensor, per row or per ``block``.

    Raises ValueError unless exactly one of ``SCALES`` is there and fits the weight.
    """
    floats = [name for name, entry in entries.items() if entry.dtype == FLOAT8 and name not in SCALES]
    for name in floats:
        if name != "weight" or len(entries[name].shape) != 2:
            shape = entries[name].shape
            raise ValueError(f"{module}.{name} {shape} is {FLOAT8}, which only weights of projections can be")
    if not floats:
        return {}
    scales = [name for name in SCALES if name in entries]
    if len(scales) != 1:
        raise ValueError(f"{module}.weight is {FLOAT8} and has {len(scales)} of {' and '.join(SCALES)} beside it")
    (rows, columns), (name,) = entries["weight"].shape, scales
    fitting: dict[tuple[int, ...], Block | None] = {}
    if block is not None:
        fitting[-(-rows // block[0]), -(-columns // block[1])] = block
    fitting |= dict.fromkeys(((), (1,), (1, 1), (rows,), (rows, 1)))
    scale = entries[name]
    if scale.dtype not in (*SCALE_DTYPES, E8M0) or scale.shape not in fitting:
        raise ValueError(f"{module}.{name} {scale.shape} does not fit the weight's {(rows, columns)}")
    return {"weight": Found((rows, columns), float8_form(fitting[scale.shape]), ("weight", name))}


def read_float8(weight: Found, tensors: Mapping[str, Tensor], block: Block | None) -> QuantizedRows:
    """Does what ``Format.read`` does, for weights that ``find_float8`` has found."""
    codes, scale = (tensors[name] for name in weight.parts)
    assert weight.form is not None
    scale = scale.float()
    if weight.form == FP8_ROWS:
        return QuantizedRows((codes, scale.reshape(-1, 1).expand(len(codes), 1)), weight.form)
    assert block is not None
    return QuantizedRows((codes, scale.repeat_interleave(block[0], 0)[: len(codes)]), weight.form)
