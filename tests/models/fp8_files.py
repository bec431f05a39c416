"""Checkpoints of a tiny model in 8-bit floats, of every kind that loads, and what must become of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bad_files import edit_json
from families import build
from safetensors.torch import load_file, save_file
from torch import Tensor

from shadowkv.ops.activation_rows.reference import FP8

BLOCK = 32
GROUP = {"targets": ["Linear"], "input_activations": {"type": "float", "num_bits": 8, "dynamic": True}}


def compressed_tensors(strategy: str, **weights: Any) -> dict[str, Any]:
    """Its config as llm-compressor writes it, as far as it is read."""
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True, "dynamic": False} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {**GROUP, "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "compressed-tensors, rows": (compressed_tensors("channel"), "weight_scale", "rows"),
    "compressed-tensors, whole": (compressed_tensors("tensor"), "weight_scale", "whole"),
    "compressed-tensors, blocks": (
        compressed_tensors("block", block_structure=[BLOCK, BLOCK]), "weight_scale", "blocks",
    ),
    "fp8, whole": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", "whole"),
    "fp8, whole, inverse": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, "weight_scale_inv", "whole",
    ),
    "fp8, blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
        "weight_scale_inv", "blocks",
    ),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "weight_scale", "rows"),
}  # fmt: skip
"""Name -> quantization_config, name of scales, and of what each is."""


def quantize(weight: Tensor, of: str) -> tuple[Tensor, Tensor]:
    """Codes, and scales as files have them: bfloat16 of rows, of a whole weight with no dimension."""
    rows, columns = weight.shape
    if of == "blocks":
        down, across = -(-rows // BLOCK), -(-columns // BLOCK)
        scale = torch.empty(down, across)
        codes = torch.empty_like(weight, dtype=FP8)
        for i in range(down):
            for j in range(across):
                part = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                scale[i, j] = weight[part].abs().max() / 448
                codes[part] = (weight[part] / scale[i, j]).to(FP8)
        return codes, scale
    largest = weight.abs().amax(1, keepdim=True) if of == "rows" else weight.abs().max()
    scale = (largest / 440).bfloat16()  # with room, as rounded scales may be too small
    return (weight / scale.float()).to(FP8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Numbers of codes with scales of blocks, of rows, or of a whole weight."""
    scale = scale.float()
    if scale.ndim == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 0)[: len(codes)].repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return codes.float() * scale


def write_fp8(directory: Path, kind: str, case: str = "qwen3", keep: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Write a tiny model of that kind, modules ``keep`` unquantized; returns its tensors."""
    build(case, directory)
    config, scale_name, of = KINDS[kind]
    edit_json(directory / "config.json", quantization_config=config)
    file, tensors = directory / "model.safetensors", {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.endswith("_proj.weight") and not any(part in name for part in keep):
            tensors[name], tensors[name.replace("weight", scale_name)] = quantize(tensor, of)
            if config.get("activation_scheme") == "static":
                tensors[name.replace("weight", "input_scale")] = torch.ones(())
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, file)
    return tensors
