"""Qwen3.5 with experts, such as 35B-A3B. It has Qwen3.5's layers, a softmax over all experts, and a gated shared expert
that takes every token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.layers.spec import Experts
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.families.hybrids import qwen3_5
from shadowkv.models.weight_names import Targets
from shadowkv.ops.choose_experts.routing import Routing

FIELDS = (
    *qwen3_5.FIELDS,
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
)

text_weight, DRAFT_HEAD = qwen3_5.text_weight, qwen3_5.DRAFT_HEAD


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen3_5_moe`` config; raises ValueError if it cannot be run."""
    # Configs leave out the width of MLPs, because no layer has one.
    config = qwen3_5.config_from_hf({"intermediate_size": hf.get("moe_intermediate_size"), **hf}, max_model_len)
    fields = expert_fields(
        hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"
    )
    shared = fields["shared_expert_intermediate_size"]
    routing = Routing(fields["num_experts"], fields["num_experts_per_tok"], normalised=True)
    experts = Experts(routing, fields["moe_intermediate_size"], shared_size=shared, shared_gate=shared > 0)
    return replace(config, experts=experts)


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return qwen3_5.targets(config)
