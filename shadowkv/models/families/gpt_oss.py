"""gpt-oss-20b and -120b (arXiv:2508.10925): attention sinks, and a window in every second layer. Experts have biases
and a clamped gate; a softmax over the chosen experts weighs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.layers.spec import Experts
from shadowkv.models.checkpoints.files import join_reasons
from shadowkv.models.configs.config_json import LAYER_TYPES, build_config, window_of, wrong_fields
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import Target, Targets, decoder_targets
from shadowkv.ops.activation_rows.reference import ALPHA, LIMIT
from shadowkv.ops.choose_experts.routing import Routing

FIELDS = (
    *("attention_bias", "sliding_window", "layer_types", "num_local_experts", "num_experts_per_tok"),
    *("swiglu_alpha", "swiglu_limit"),
)

INTERLEAVED_EXPERTS = True

_ACTIVATION = {"hidden_act": "silu", "swiglu_alpha": ALPHA, "swiglu_limit": LIMIT}
"""Fields that describe the gate, with their only supported values."""


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``gpt_oss`` config; raises ValueError if it cannot be run."""
    others = {name: hf[name] for name, run in _ACTIVATION.items() if hf.get(name) not in (None, run)}
    reasons = wrong_fields(hf)
    reasons += [
        f"{name}={str(value)[:60]} is not supported, only {_ACTIVATION[name]}" for name, value in others.items()
    ]
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    bias = bool(hf.get("attention_bias", True))
    types = [LAYER_TYPES[layer % 2 == 0] for layer in range(hf["num_hidden_layers"])]
    config = build_config(
        hf,
        max_model_len=max_model_len,
        default_theta=150000.0,
        window=window_of(hf),
        layer_types=hf.get("layer_types") or types,
        qkv_bias=bias,
        attention_out_bias=bias,
        sinks=True,
    )
    fields = expert_fields(hf, "num_local_experts", "num_experts_per_tok")
    # A softmax over all experts, normalised over the chosen ones, equals a softmax over the chosen ones.
    routing = Routing(fields["num_local_experts"], fields["num_experts_per_tok"])
    return replace(config, activation="clamped_silu", experts=Experts(routing, config.intermediate_size, biases=True))


def targets(config: ModelConfig) -> Targets:
    """Names of weights, after ``checkpoints.experts`` has split tensors of all experts -> parameters."""
    sinks = {
        f"model.layers.{layer}.self_attn.sinks": Target(f"layers.{layer}.attention.sinks", 0, config.num_query_heads)
        for layer in range(config.num_layers)
    }
    return decoder_targets(config, router="router") | sinks
