"""What the formats' own libraries have packed is read as they read it, where they are installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from quantized_files import KINDS, spiked
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shadowkv.models.checkpoints.quantized.format import Entry, Format
from shadowkv.models.checkpoints.quantized.registry import format_of
from shadowkv.models.checkpoints.stored_weight import dense

NAMES = {
    torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
"""safetensors' names of types."""


def read(format: Format, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    entries = {name: Entry(tuple(tensor.shape), NAMES[tensor.dtype]) for name, tensor in tensors.items()}
    found = format.find("model.layers.0.mlp.up_proj", entries, tensors.__getitem__)
    return {
        name: dense(format.read(weight, {part: tensors[part] for part in weight.parts}))
        for name, weight in found.items()
    }


def test_experts_of_gpt_oss() -> None:
    torch.manual_seed(0)
    experts, rows, groups = 3, 8, 4
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (experts, rows, groups), dtype=torch.uint8)
    format = format_of("mxfp4", {"modules_to_not_convert": ["model.layers.*.self_attn"]})
    found = read(format, {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales, "gate_up_proj_bias": scales})
    assert found.keys() == {"gate_up_proj"}
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, K, N]
    assert torch.equal(found["gate_up_proj"].view(experts, rows, 32 * groups), expected.transpose(1, 2))
    with pytest.raises(ValueError, match=r"down_proj_scales is missing beside down_proj_blocks"):
        read(format, {"down_proj_blocks": blocks})
    with pytest.raises(ValueError, match=r"gate_up_proj_scales is U8 \(2, 8, 4\), not U8 \(3, 8, 4\)"):
        read(format, {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales[:2]})


def compressed(arguments: dict[str, Any], weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A weight as compressed-tensors packs it, and as it reads that."""
    library = pytest.importorskip("compressed_tensors.compressors.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    parameters = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    layout, group = arguments["format"], arguments["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=group["weights"], format=layout)
    stored: dict[str, Tensor] = {"weight": weight}
    size = {"tensor_group": 16, "group": group["weights"].get("group_size")}.get(group["weights"]["strategy"])
    parted = weight.unflatten(1, (-1, size or weight.shape[1]))
    if layout == "nvfp4-pack-quantized":
        stored["weight_global_scale"] = parameters.generate_gparam(weight.min(), weight.max()).reshape(1)
    if group["weights"]["strategy"] == "block":
        block = group["weights"]["block_structure"][0]
        parted = weight.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2).flatten(2)
    scale, zero = parameters.calculate_qparams(
        parted.amin(2), parted.amax(2), scheme.weights, global_scale=stored.get("weight_global_scale")
    )
    stored |= {"weight_scale": scale, "weight_zero_point": zero}
    made = library.BaseCompressor.get_value_from_registry(layout)
    packed = made.compress(stored, scheme)
    return packed, made.decompress(dict(packed), scheme)["weight"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][0]["quant_method"] == "compressed-tensors"])
def test_what_compressed_tensors_packs(kind: str) -> None:
    config = KINDS[kind][0]
    weight = spiked(256, 384, torch.Generator().manual_seed(1))
    packed, expected = compressed(config, weight)
    found = read(format_of("compressed-tensors", config), packed)["weight"]
    scale = expected.abs().max()
    assert scale > 0.5
    # Its numbers may be rounded to the dtype of scales, which is bfloat16 for those in 4-bit floats.
    torch.testing.assert_close(found, expected.float(), rtol=2**-8 if "fp4" in kind else 1e-6, atol=0)
