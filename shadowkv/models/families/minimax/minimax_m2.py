"""MiniMax-M2, M2.1 and M2.5 (huggingface.co/MiniMaxAI/MiniMax-M2). Attention is full. The queries of all heads are
normalised together, and so are the keys. Half of each head rotates. Every layer has experts, chosen by sigmoids with a
correction bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.layers.spec import Experts
from shadowkv.models.checkpoints.files import join_reasons
from shadowkv.models.configs.config_json import build_config, wrong_fields
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import Targets, decoder_targets, head_norms
from shadowkv.ops.choose_experts.routing import Routing

_ONLY = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
"""Fields that have the same value in all published configs. Only this value is supported."""

FIELDS = ("num_local_experts", "num_experts_per_tok", "rotary_dim", "num_mtp_modules", "attn_type_list", *_ONLY)

_FULL = 1
"""Value for full attention in ``attn_type_list``; 0 is linear attention, which only earlier models have."""


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``minimax_m2`` config; raises ValueError if it cannot be run."""
    reasons = wrong_fields(hf)
    reasons += [
        f"{name}={str(hf[name])[:60]} is not supported, only {value}"
        for name, value in _ONLY.items()
        if hf.get(name) not in (None, value)
    ]
    types = hf.get("attn_type_list")
    if types is not None and types != [_FULL] * hf["num_hidden_layers"]:
        reasons.append(
            f"attn_type_list={str(types)[:60]} is not supported, only {_FULL}, full attention, for each layer"
        )
    if reasons:
        raise ValueError(f"this config cannot be used: {join_reasons(reasons)}")
    fields = expert_fields(hf, "num_local_experts", "num_experts_per_tok")
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    rotating = fields.get("rotary_dim", head_dim)
    config = build_config(
        {**hf, "head_dim": head_dim},
        max_model_len=max_model_len,
        default_theta=5e6,
        default_partial=rotating / head_dim,
    )
    routing = Routing(fields["num_local_experts"], fields["num_experts_per_tok"], scores="sigmoid", corrected=True)
    return replace(
        config,
        normed_heads=(config.num_query_heads, config.num_kv_heads),
        experts=Experts(routing, config.intermediate_size),
        draft_layers=fields.get("num_mtp_modules", 0),
    )


def targets(config: ModelConfig) -> Targets:
    """Names of weights, after ``checkpoints.experts`` has split tensors of all experts -> parameters."""
    result = decoder_targets(config) | head_norms(config)
    return {name.replace(".gate.e_score_", ".e_score_"): target for name, target in result.items()}
