"""NVIDIA's Model Optimizer: NVFP4 with two levels of scales, and 8-bit floats, as ``export/quant_utils.py`` and
``qtensor/nvfp4_tensor.py`` in nvidia-modelopt 0.47 write them.

An NVFP4 weight of N rows and K columns is ``weight``, uint8 [N, K / 2], ``weight_scale``, float8_e4m3fn [N, K / 16],
and ``weight_scale_2``, one float32. A number is the product of its code and both scales. The config is in config.json,
or in hf_quant_config.json beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shadowkv.models.checkpoints.quantized.format import Entry, Found, Read
from shadowkv.models.checkpoints.quantized.fp4 import NVFP4, find_fp4, fp4_rows
from shadowkv.models.checkpoints.quantized.fp8 import find_float8, float8_form, read_float8
from shadowkv.models.checkpoints.quantized.names import any_matches, list_of_names
from shadowkv.models.checkpoints.safetensors_weights import FLOAT8
from shadowkv.ops.quantized.rows import Form, QuantizedRows

ALGORITHMS: dict[str, Form] = {
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "FP8": float8_form(None),
    "FP8_PER_CHANNEL_PER_TOKEN": float8_form(None),
}


class ModelOpt:
    """ModelOpt's format as a config describes it; raises ValueError for unsupported algorithms."""

    method = "modelopt"
    dtypes = ("U8", FLOAT8)

    def __init__(self, stated: Mapping[str, Any]) -> None:
        algorithm = stated.get("quant_algo")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"quant_algo={str(algorithm)[:60]!r} is not one of {', '.join(ALGORITHMS)}")
        self._form = ALGORITHMS[algorithm]
        names = [name for name in ("ignore", "exclude_modules") if stated.get(name) is not None]
        self._plain = tuple(pattern for name in names for pattern in list_of_names(stated[name], name))

    def find(self, module: str, entries: Mapping[str, Entry], read: Read) -> Mapping[str, Found]:
        """As ``Format.find``."""
        if "weight" in entries and entries["weight"].dtype == "U8":
            return {"weight": find_fp4(entries, NVFP4, "weight", "weight_scale", "weight_scale_2")}
        return find_float8(module, entries, None)

    def read(self, weight: Found, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        """As ``Format.read``."""
        if weight.form == NVFP4:
            return fp4_rows(NVFP4, *(tensors[name] for name in weight.parts))
        return read_float8(weight, tensors, None)

    def planned(self, module: str) -> Form | None:
        """As ``Format.planned``."""
        return None if module == "lm_head" or any_matches(module, self._plain) else self._form
