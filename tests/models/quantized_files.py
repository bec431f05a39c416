"""Checkpoints of a tiny model in every format of quantized weights, packed here number by number as the formats' own
libraries document it, and the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bad_files import edit_json
from families import build
from safetensors.torch import load_file, save_file
from torch import Tensor

from shadowkv.ops.activation_rows.reference import FP8

SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}
GROUP, FP8_BLOCK = 64, 128
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
PROJECTIONS = (
    *("_proj.weight", "_proj_qkv.weight", "_proj_z.weight", "_proj_qkvz.weight"),
    *(f".w{n}.weight" for n in "123"),
)
"""Ends of the names of weights that are quantized."""
Encoded = tuple[dict[str, Tensor], Tensor]
"""Tensors by the last parts of their names, and the numbers, float32 [N, K]."""


def spiked(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random weights with a few columns, rows and single numbers that are far larger."""
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    weight[:, :: columns // 3] *= 8
    weight[:: rows // 2] *= 5
    weight[rows // 3, columns // 5] = 2.0
    return weight


def integers(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 on [N, K], float16 scales and zero points [N, G] of groups of columns."""
    grouped = weight.unflatten(1, (-1, group))
    top = (1 << bits) - 1
    if symmetric:
        scale = (grouped.abs().amax(2) / (top // 2)).clamp(min=1e-4).half()
        zero = torch.full(scale.shape, (top + 1) // 2)
    else:
        least, most = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = ((most - least) / top).clamp(min=1e-4).half()
        zero = (-least / scale.float()).round().int().clamp(1, top)  # none less than 1: GPTQ's first format has no 0
    codes = (grouped / scale.float()[..., None]).round().int() + zero[..., None]
    return codes.clamp(0, top).flatten(1), scale, zero


def numbers(codes: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> Tensor:
    """What codes stand for whose column k is in group ``groups[k]``."""
    return (codes - zero[:, groups]).float() * scale.float()[:, groups]


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes along rows in int32, the first in the lowest bits."""
    each = 32 // bits
    packed = torch.zeros(len(codes), codes.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        packed |= codes[:, place::each].long() << bits * place
    return packed.where(packed < 2**31, packed - 2**32).int()


def awq(weight: Tensor, group: int = GROUP) -> Encoded:
    codes, scale, zero = integers(weight, 4, group, symmetric=False)
    order = [8 * word + place for word in range(len(weight) // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    tensors = {
        "qweight": words(codes.T[:, order], 4), "qzeros": words(zero.T[:, order], 4), "scales": scale.T.contiguous(),
    }  # fmt: skip
    return tensors, numbers(codes, scale, zero, torch.arange(weight.shape[1]) // group)


def gptq(weight: Tensor, bits: int = 4, symmetric: bool = True, v2: bool = False, order: str | None = None) -> Encoded:
    """``order`` of groups: None for no ``g_idx``, "kept", or "scattered" as quantizing by activations leaves it."""
    columns = weight.shape[1]
    groups = torch.arange(columns) // GROUP
    if order == "scattered":
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    in_groups = torch.argsort(groups, stable=True)
    sorted_codes, scale, zero = integers(weight[:, in_groups], bits, GROUP, symmetric)
    codes = torch.empty_like(sorted_codes)
    codes[:, in_groups] = sorted_codes
    tensors = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zero - (0 if v2 else 1)).T, bits),
        "scales": scale.T.contiguous(),
    }
    if order is not None:
        tensors["g_idx"] = groups.int()
    return tensors, numbers(codes, scale, zero, groups)


def packed(weight: Tensor, bits: int = 4, group: int | None = GROUP, symmetric: bool = True) -> Encoded:
    """compressed-tensors' ``pack-quantized``."""
    group = group or weight.shape[1]
    codes, scale, zero = integers(weight, bits, group, symmetric)
    tensors = {
        "weight_packed": words(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = words(zero.T, bits).T.contiguous()
    return tensors, numbers(codes, scale, zero, torch.arange(weight.shape[1]) // group)


def int8_rows(weight: Tensor) -> Encoded:
    """compressed-tensors' ``int-quantized``."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def float8(weight: Tensor, block: tuple[int, int] | None, name: str = "weight_scale") -> Encoded:
    """One scale a row, or one for every block."""
    rows, columns = block or (1, weight.shape[1])
    wide = torch.zeros(-(-len(weight) // rows) * rows, -(-weight.shape[1] // columns) * columns)
    wide[: len(weight), : weight.shape[1]] = weight
    scale = wide.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3)).clamp(min=1e-6) / 448
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(weight), : weight.shape[1]]
    codes = (weight / spread).to(FP8)
    return {"weight": codes, name: scale}, codes.float() * spread


def int8_whole(weight: Tensor) -> Encoded:
    """compressed-tensors' ``pack-quantized`` with one scale."""
    scale = (weight.abs().max() / 127).reshape(1)
    codes = (weight / scale).round().int() + 128
    tensors = {"weight_packed": words(codes, 8), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return tensors, (codes - 128).float() * scale


def float8_whole(weight: Tensor) -> Encoded:
    """ModelOpt's, with one scale that has no dimension."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(FP8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp4(scaled: Tensor) -> Tensor:
    """Codes of the nearest numbers in e2m1, [N, K]."""
    nearest = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    return nearest + 8 * (scaled < 0)


def fp4_numbers(codes: Tensor) -> Tensor:
    return torch.cat((E2M1, -E2M1))[codes]


def bytes_of(codes: Tensor) -> Tensor:
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def nvfp4(weight: Tensor, names: tuple[str, str], divides: bool) -> Encoded:
    """With the scale of the tensor as it is multiplied, or its inverse."""
    whole = weight.abs().max() / (6 * 448)
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(2) / (6 * whole)).clamp(2**-9, 448).to(FP8)
    steps = (scale.float() * whole).repeat_interleave(16, 1)
    codes, stored = fp4(weight / steps), 1 / whole if divides else whole
    tensors = {names[0]: bytes_of(codes), "weight_scale": scale, names[1]: stored.reshape(1) if divides else stored}
    return tensors, fp4_numbers(codes) * steps


def mxfp4(weight: Tensor) -> Encoded:
    exponent = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 6).clamp(min=2**-40).log2().ceil()
    steps = (2.0**exponent).repeat_interleave(32, 1)
    codes = fp4(weight / steps)
    tensors = {"weight_packed": bytes_of(codes), "weight_scale": (exponent + 127).to(torch.uint8)}
    return tensors, fp4_numbers(codes) * steps


def schemes(layout: str, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers[.]0[.]mlp[.]down_proj"], "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
KINDS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Encoded]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "gptq": (GPTQ, gptq),
    "gptq, in order": (GPTQ | {"desc_act": True}, lambda weight: gptq(weight, order="kept")),
    "gptq, scattered": (GPTQ | {"desc_act": True}, lambda weight: gptq(weight, order="scattered")),
    "gptq, zero points": (GPTQ | {"sym": False}, lambda weight: gptq(weight, symmetric=False)),
    "gptq, zero points, v2": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, symmetric=False, v2=True),
    ),
    "gptq, 8 bits": (GPTQ | {"bits": 8, "sym": False}, lambda weight: gptq(weight, bits=8, symmetric=False)),
    "int4": (schemes("pack-quantized", **INT4), packed),
    "int4, zero points": (
        schemes("pack-quantized", **INT4 | {"symmetric": False}), lambda weight: packed(weight, symmetric=False),
    ),
    "int4, rows": (
        schemes("pack-quantized", type="int", num_bits=4, strategy="channel"),
        lambda weight: packed(weight, group=None),
    ),
    "int8": (
        schemes("pack-quantized", type="int", num_bits=8, strategy="channel"),
        lambda weight: packed(weight, bits=8, group=None),
    ),
    "int8, whole": (schemes("pack-quantized", type="int", num_bits=8, strategy="tensor"), int8_whole),
    "int8 products": (schemes("int-quantized", type="int", num_bits=8, strategy="channel"), int8_rows),
    "fp8, rows": (
        schemes("float-quantized", type="float", num_bits=8, strategy="channel"), lambda weight: float8(weight, None),
    ),
    "fp8, blocks": (
        schemes("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[FP8_BLOCK, FP8_BLOCK]),
        lambda weight: float8(weight, (FP8_BLOCK, FP8_BLOCK)),
    ),
    "fp8, Qwen3's blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]},
        lambda weight: float8(weight, (FP8_BLOCK, FP8_BLOCK), "weight_scale_inv"),
    ),
    "nvfp4": (
        schemes("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        lambda weight: nvfp4(weight, ("weight_packed", "weight_global_scale"), divides=True),
    ),
    "mxfp4": (schemes("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32), mxfp4),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, float8_whole),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda weight: nvfp4(weight, ("weight", "weight_scale_2"), divides=False),
    ),
}  # fmt: skip
"""Name -> quantization_config, and what encodes a weight."""


def write_quantized(folder: Path, kind: str, case: str = "llama-bias-head-dim", **sizes: int) -> tuple[Path, Path]:
    """A tiny model of that kind, and the same one unquantized with the numbers that its weights stand for, in float32.

    One projection stays plain, as does the head.
    """
    model = build(case, folder / "quantized", {**SIZES, **sizes})
    build(case, folder / "plain", {**SIZES, **sizes})
    config, encode = KINDS[kind]
    edit_json(folder / "quantized" / "config.json", quantization_config=config)
    generator, tensors, plain = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in load_file(folder / "plain" / "model.safetensors").items():
        if not name.endswith(PROJECTIONS) or "layers.0.mlp.down_proj" in name:
            tensors[name] = plain[name] = tensor
            continue
        parts, plain[name] = encode(spiked(*tensor.shape, generator))
        tensors |= {name.replace("weight", part): stored.contiguous() for part, stored in parts.items()}
    save_file(tensors, folder / "quantized" / "model.safetensors")
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    assert model.config.hidden_size == sizes.get("hidden_size", SIZES["hidden_size"])
    return folder / "quantized", folder / "plain"
