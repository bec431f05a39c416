"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, with experts and a gated shared expert that takes every token
(arXiv:2407.10671)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.kvcache.policy.shape import FULL, LayerKind
from shadowkv.layers.spec import Experts
from shadowkv.models.configs.config_json import window_of
from shadowkv.models.configs.experts_json import dense_layers, expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.families import qwen2
from shadowkv.models.weight_names import Targets
from shadowkv.ops.choose_experts.routing import Routing

FIELDS = (
    *qwen2.FIELDS,
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "qkv_bias"),
)


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen2_moe`` config; raises ValueError if it cannot be run."""
    config = qwen2.config_from_hf(hf, max_model_len)
    if hf.get("layer_types") is None and hf.get("use_sliding_window"):
        config = replace(config, layer_kinds=_kinds(config.num_layers, window_of(hf), hf.get("max_window_layers")))
    fields = expert_fields(
        hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"
    )
    normalised, shared = fields.get("norm_topk_prob", False), fields["shared_expert_intermediate_size"]
    experts = Experts(
        Routing(fields["num_experts"], fields["num_experts_per_tok"], normalised=normalised),
        fields["moe_intermediate_size"],
        shared_size=shared,
        shared_gate=shared > 0,
    )
    dense, bias = dense_layers(fields, config.num_layers), fields.get("qkv_bias", True)
    return replace(config, qkv_bias=bias, experts=experts, dense_layers=dense)


def _kinds(layers: int, window: LayerKind, first_full: int | None) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer for a config without ``layer_types``. As in Transformers, every second one of the
    first ``first_full`` layers has the window; None means ``FIRST_WINDOW``."""
    with_window = range(0, min(layers, qwen2.FIRST_WINDOW if first_full is None else first_full), 2)
    return tuple(window if layer in with_window else FULL for layer in range(layers))


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return qwen2.targets(config)
