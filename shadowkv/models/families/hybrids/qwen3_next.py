"""Qwen3-Next (Qwen team, 2025), such as 80B-A3B. It has Qwen3.5's layers, and Qwen3's mixture of experts with a gated
shared expert. Its files join the input projections of linear attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.layers.spec import Experts, LinearAttention
from shadowkv.models.configs.experts_json import dense_layers, expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.families.hybrids import qwen3_5
from shadowkv.models.weight_names import Targets
from shadowkv.ops.choose_experts.routing import Routing

FIELDS = (
    *qwen3_5.FIELDS,
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
)

text_weight = qwen3_5.text_weight


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen3_next`` config; raises ValueError if it cannot be run."""
    config = qwen3_5.config_from_hf({"intermediate_size": hf.get("moe_intermediate_size"), **hf}, max_model_len)
    assert isinstance(config.linear, LinearAttention), "a model of this family has linear attention"
    fields = expert_fields(
        hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"
    )
    shared, normalised = fields["shared_expert_intermediate_size"], fields.get("norm_topk_prob", True)
    routing = Routing(fields["num_experts"], fields["num_experts_per_tok"], normalised=normalised)
    experts = Experts(routing, fields["moe_intermediate_size"], shared_size=shared, shared_gate=shared > 0)
    config = config.with_linear(replace(config.linear, joined=("qkvz", "ba")))
    return replace(config, experts=experts, dense_layers=dense_layers(fields, config.num_layers))


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return qwen3_5.targets(config)
