"""Formats of quantized checkpoints by the config's ``quant_method``; a format's module is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch

from shadowkv.models.checkpoints.quantized.format import Format
from shadowkv.models.checkpoints.quantized.fp4 import MXFP4, NVFP4
from shadowkv.ops.quantized.groups import GroupForm
from shadowkv.ops.quantized.rows import Form

FORMATS = {
    "awq": ("awq", "AWQ"),
    "gptq": ("gptq", "GPTQ"),
    "compressed-tensors": ("compressed_tensors", "CompressedTensors"),
    "fp8": ("fp8", "FP8"),
    "fbgemm_fp8": ("fp8", "FP8"),
    "modelopt": ("modelopt", "ModelOpt"),
    "mxfp4": ("mxfp4", "MXFP4Experts"),
}
"""quant_method -> module of this folder, and its class. A new format is one module and one line here."""

SHAPES: dict[str, Form] = {
    "fp8-block": GroupForm("e4m3", 128, torch.float32),
    "awq": GroupForm("int4", 128, torch.float16, zeros=True),
    "gptq": GroupForm("int4", 128, torch.float16),
    "int4": GroupForm("int4", 128, torch.float16),
    "int8": GroupForm("int8", None, torch.bfloat16),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}
"""Name in ``load_settings.QUANTIZATIONS`` -> form of the projections where no files state it: in memory plans, and with
random weights. Most checkpoints have these forms."""


def format_of(method: str, stated: Mapping[str, Any]) -> Format:
    """The format that a config describes; raises ValueError with the reason if there is none."""
    if method not in FORMATS:
        raise ValueError(f"this format is not supported; supported formats: {', '.join(FORMATS)}")
    module, name = FORMATS[method]
    made = getattr(import_module(f"shadowkv.models.checkpoints.quantized.{module}"), name)
    return cast(Format, made({**stated, "quant_method": method}))
