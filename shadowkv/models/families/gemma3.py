"""Gemma 3 (arXiv:2503.19786), the text model: five layers with a sliding window, then one with full attention.

Layers with a window have a separate RoPE. Each layer has four norms. Norms with weights w multiply by 1 + w, in
float32. Queries and keys are normalised per head. Embeddings are scaled. ``gemma3`` models also read images; only their
text model is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.kvcache.policy.shape import FULL, LayerKind
from shadowkv.models.checkpoints.files import join_reasons
from shadowkv.models.configs.config_json import LAYER_TYPES, build_config, wrong_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.configs.rope import rope_from_hf
from shadowkv.models.weight_names import Targets, decoder_targets, rows

_NOT_RUN = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
FIELDS = (
    *("attention_bias", "sliding_window", "sliding_window_pattern", "layer_types", "rope_local_base_freq"),
    *("hidden_activation", "query_pre_attn_scalar", *_NOT_RUN),
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""Transformers' defaults. Configs of models with images leave out fields with these values."""

_OTHERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""Prefixes of weights in ``gemma3`` files. Weights with a prefix in ``_OTHERS`` belong to the image encoder.
``_PREFIXES`` maps the text model's prefixes, as released and as Transformers 5 saves them, to those of ``gemma3_text``
files."""


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``gemma3_text`` or ``gemma3`` config; raises ValueError if it cannot be run."""
    hf = {**_DEFAULTS, **hf}
    reasons = [*wrong_fields(hf), *(f"{name}={hf[name]!r} is not supported" for name in _NOT_RUN if hf.get(name))]
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    pattern, head_dim = hf["sliding_window_pattern"], hf["head_dim"]
    types = [LAYER_TYPES[bool((layer + 1) % pattern)] for layer in range(hf["num_hidden_layers"])]
    local = {"rope_theta": hf["rope_local_base_freq"], "partial_rotary_factor": hf.get("partial_rotary_factor")}
    rope = rope_from_hf(local, head_dim, max_model_len=max_model_len)
    bias = bool(hf.get("attention_bias", False))
    return build_config(
        {**hf, "hidden_act": hf.get("hidden_act", hf["hidden_activation"])},
        max_model_len=max_model_len,
        window=LayerKind(hf["sliding_window"], rope) if hf["sliding_window"] else FULL,
        layer_types=hf.get("layer_types") or types,
        embedding_scale=hf["hidden_size"] ** 0.5,
        query_scale=(head_dim / hf["query_pre_attn_scalar"]) ** 0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
        post_norms=True,
        wide_norms=True,
    )


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    result = decoder_targets(config)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        norms = {"post_attention": "post_attention", "pre_feedforward": "mlp", "post_feedforward": "post_mlp"}
        for name, norm in norms.items():
            result |= rows(f"{theirs}.{name}_layernorm", f"{ours}.{norm}_norm", 0, config.hidden_size)
        for name, norm in (("q", "query"), ("k", "key")):
            result |= rows(f"{theirs}.self_attn.{name}_norm", f"{ours}.attention.{norm}_norm", 0, config.head_dim)
    return {
        name: replace(target, offset=1.0, scale=config.query_scale if ".query_norm." in target.parameter else 1.0)
        if name.endswith("norm.weight")
        else target
        for name, target in result.items()
    }


def text_weight(name: str) -> str | None:
    """Returns a weight's name in the text model; None for weights of the image encoder."""
    if name.startswith(_OTHERS):
        return None
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
