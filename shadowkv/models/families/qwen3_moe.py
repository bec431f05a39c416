"""Qwen3 with experts (30B-A3B, 235B-A22B and Coder): Qwen3's attention, and a softmax over all experts
(arXiv:2505.09388)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.layers.spec import Experts
from shadowkv.models.configs.experts_json import dense_layers, expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.families import qwen3
from shadowkv.models.weight_names import Targets
from shadowkv.ops.choose_experts.routing import Routing

FIELDS = (
    *("attention_bias", "sliding_window", "use_sliding_window"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers"),
)


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen3_moe`` config; raises ValueError if it cannot be run."""
    # If a config has a window, all layers have it. No released model has one.
    config = qwen3.config_from_hf(hf | {"max_window_layers": 0, "layer_types": None}, max_model_len)
    fields = expert_fields(hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    normalised = fields.get("norm_topk_prob", False)
    routing = Routing(fields["num_experts"], fields["num_experts_per_tok"], normalised=normalised)
    experts = Experts(routing, fields["moe_intermediate_size"])
    return replace(config, experts=experts, dense_layers=dense_layers(fields, config.num_layers))


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return qwen3.targets(config)
