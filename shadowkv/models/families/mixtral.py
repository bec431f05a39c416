"""Mixtral 8x7B and 8x22B: Llama with experts in every layer, each as wide as Llama's MLP (arXiv:2401.04088)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.layers.spec import Experts
from shadowkv.models.configs.config_json import build_config, window_of
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import Targets, decoder_targets
from shadowkv.ops.choose_experts.routing import Routing

FIELDS = ("sliding_window", "num_local_experts", "num_experts_per_tok")


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``mixtral`` config; raises ValueError if it cannot be run."""
    config = build_config(hf, max_model_len=max_model_len, default_theta=1e6, window=window_of(hf))
    fields = expert_fields(hf, "num_local_experts", "num_experts_per_tok")
    routing = Routing(fields["num_local_experts"], fields["num_experts_per_tok"])
    return replace(config, experts=Experts(routing, config.intermediate_size))


def targets(config: ModelConfig) -> Targets:
    """Names of weights, after ``checkpoints.experts`` has split tensors of all experts -> parameters."""
    return decoder_targets(config)
