"""Qwen3.5 and later (Qwen team, 2026), the text model: three layers of linear attention for each layer of full
attention.

Layers of full attention gate their output, and rotate a quarter of each head. Norms multiply by 1 + w, in float32,
except those of linear attention. The multimodal RoPE has three positions per token. For text they are equal, which
makes it an ordinary RoPE. Image encoders in the files are not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.kvcache.policy.shape import FULL
from shadowkv.layers.spec import LinearAttention
from shadowkv.models.checkpoints.files import join_reasons
from shadowkv.models.configs.config_json import build_config
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import (
    DraftHeadNames,
    Target,
    Targets,
    decoder_targets,
    draft_head_targets,
    head_norms,
    rows,
)

LINEAR, FULL_ATTENTION = "linear_attention", "full_attention"
_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Fields of linear attention, with transformers' defaults."""
MAX_SIZE = 1 << 12

FIELDS = (
    *_SIZES,
    *("attention_bias", "layer_types", "full_attention_interval", "attn_output_gate", "mamba_ssm_dtype"),
    *("output_gate_type", "mtp_num_hidden_layers"),
)

DRAFT_HEAD = DraftHeadNames(
    layer="mtp.layers.0",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
    norm_offset=1.0,
)

_OTHERS = ("model.visual.", "visual.", "mtp.")
_PREFIX = "model.language_model."


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen3_5`` config; raises ValueError if it cannot be run."""
    hf = {"head_dim": 256, **hf}
    if hf.get("attn_output_gate", True) is not True:
        gate = f"attn_output_gate={hf['attn_output_gate']!r:.60}"
        raise ValueError(f"this config cannot be used: {gate} is not supported, only true")
    bias = bool(hf.get("attention_bias", False))
    config = build_config(
        hf,
        max_model_len=max_model_len,
        default_partial=0.25,
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
        output_gate=True,
        wide_norms=True,
    )
    linear = _linear(hf)
    kinds = tuple(linear.kind if kind == LINEAR else FULL for kind in _layer_types(hf, config.num_layers))
    drafting = hf.get("mtp_num_hidden_layers") or 0
    return replace(config, layer_kinds=kinds, linear=linear, draft_layers=drafting, normed_draft_states=True)


def _linear(hf: dict[str, Any]) -> LinearAttention:
    """The sizes of linear attention; raises ValueError."""
    sizes = {name: default if hf.get(name) is None else hf[name] for name, default in _SIZES.items()}
    reasons = [
        f"{name}={size!r:.60} is not a whole number from 1 to {MAX_SIZE}"
        for name, size in sizes.items()
        if type(size) is not int or not 1 <= size <= MAX_SIZE
    ]
    if not reasons and sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        heads = "linear_num_value_heads={linear_num_value_heads} is not a multiple of linear_num_key_heads="
        reasons.append((heads + "{linear_num_key_heads}").format(**sizes))
    if not reasons and sizes["linear_conv_kernel_dim"] < 2:
        reasons.append("linear_conv_kernel_dim=1 is less than 2")
    if hf.get("output_gate_type") not in (None, "swish", "silu"):
        reasons.append(f"output_gate_type={hf['output_gate_type']!r:.60} is not supported, only 'swish'")
    drafting = hf.get("mtp_num_hidden_layers") or 0
    if type(drafting) is not int or not 0 <= drafting <= MAX_SIZE:
        reasons.append(f"mtp_num_hidden_layers={drafting!r:.60} is not a whole number from 0 to {MAX_SIZE}")
    if hf.get("mamba_ssm_dtype") not in (None, "float32"):
        reasons.append(f"mamba_ssm_dtype={hf['mamba_ssm_dtype']!r:.60} is not supported, only 'float32'")
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    key_heads, value_heads, key_dim, value_dim, kernel = sizes.values()
    return LinearAttention(key_heads, value_heads, key_dim, value_dim, kernel)


def _layer_types(hf: dict[str, Any], layers: int) -> list[str]:
    """The kind of every layer; raises ValueError."""
    types, every = hf.get("layer_types"), hf.get("full_attention_interval")
    if types is None:
        every = 4 if every is None else every
        if type(every) is not int or not 1 <= every <= layers:
            reason = f"full_attention_interval={every!r:.60} is not a whole number from 1 to {layers}"
            raise ValueError(f"this config cannot be used: {reason}")
        types = [LINEAR if (layer + 1) % every else FULL_ATTENTION for layer in range(layers)]
    known = LINEAR, FULL_ATTENTION
    if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
        names = " or ".join(known)
        raise ValueError(
            f"this config cannot be used: layer_types is not a list of {names} for each of {layers} layers"
        )
    if FULL_ATTENTION not in types:
        raise ValueError("this config cannot be used: no layer has full attention")
    return types


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    result = decoder_targets(config) | head_norms(config)
    result = {
        name: replace(target, offset=1.0) if name.endswith("norm.weight") else target for name, target in result.items()
    }
    linear, hidden = config.linear, config.hidden_size
    assert isinstance(linear, LinearAttention), "a model of this family has linear attention"
    for layer in range(config.num_layers):
        if config.linear_of(layer) is None:
            continue
        ours, theirs = f"layers.{layer}.linear_attention", f"model.layers.{layer}.linear_attn"
        channels, heads = linear.channels, linear.value_heads
        result |= _inputs(linear, ours, theirs)
        result |= rows(f"{theirs}.out_proj", f"{ours}.out", 0, hidden)
        result |= rows(f"{theirs}.norm", f"{ours}.norm", 0, linear.value_dim)
        result[f"{theirs}.conv1d.weight"] = Target(f"{ours}.convolution", 0, channels)
        result[f"{theirs}.A_log"] = Target(f"{ours}.log_rate", 0, heads)
        result[f"{theirs}.dt_bias"] = Target(f"{ours}.rate_bias", 0, heads)
    return result | draft_head_targets(config, targets, DRAFT_HEAD)


def _inputs(linear: LinearAttention, ours: str, theirs: str) -> Targets:
    """Targets of a layer's input projections."""
    heads, keys, channels = linear.value_heads, linear.keys, linear.channels
    group = heads // linear.key_heads

    def joined(name: str, module: str, *parts: tuple[int, int]) -> Targets:
        """Targets of a projection of several parts. A part is a pair: its first row in the parameter, and its number of
        rows per key head. The file has all parts of the first head, then those of the next."""
        first, *further = (
            (begin + head * size, begin + (head + 1) * size)
            for head in range(linear.key_heads)
            for begin, size in parts
        )
        return {f"{theirs}.{name}.weight": Target(f"{ours}.{module}.weight", *first, further=tuple(further))}

    result: Targets = {}
    if "qkvz" in linear.joined:
        of_keys, of_values = linear.key_dim, group * linear.value_dim
        parts = (0, of_keys), (keys, of_keys), (2 * keys, of_values), (channels, of_values)
        result |= joined("in_proj_qkvz", "qkvz", *parts)
    else:
        result |= rows(f"{theirs}.in_proj_qkv", f"{ours}.qkvz", 0, channels)
        result |= rows(f"{theirs}.in_proj_z", f"{ours}.qkvz", channels, channels + linear.values)
    if "ba" in linear.joined:
        result |= joined("in_proj_ba", "beta_decay", (0, group), (heads, group))
    else:
        result |= rows(f"{theirs}.in_proj_b", f"{ours}.beta_decay", 0, heads)
        result |= rows(f"{theirs}.in_proj_a", f"{ours}.beta_decay", heads, 2 * heads)
    return result


def text_weight(name: str) -> str | None:
    """Returns a weight's name in the text model; None for weights of the image encoder and of layers that draft tokens.
    If a draft head is read, ``registry.text_weight`` returns the names of its weights instead."""
    if name.startswith(_OTHERS):
        return None
    return f"model.{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else name
