"""GLM-4.5, GLM-4.5-Air and GLM-4.6 (arXiv:2508.06471). Half of each head rotates, and the first layers have an MLP.
Experts are chosen in groups, by sigmoids with a correction bias; a shared expert takes every token. One more layer
drafts tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.layers.spec import Experts
from shadowkv.models.configs.config_json import build_config
from shadowkv.models.configs.experts_json import expert_fields
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import DraftHeadNames, Targets, decoder_targets, draft_head_targets, head_norms
from shadowkv.ops.choose_experts.routing import Routing

FIELDS = (
    *("attention_bias", "use_qk_norm", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_group"),
    *("topk_group", "first_k_dense_replace", "num_nextn_predict_layers"),
)

_DRAFTING = "model.layers.{}"
DRAFT_HEAD = DraftHeadNames(
    layer=_DRAFTING,
    embedding_norm=f"{_DRAFTING}.enorm",
    hidden_norm=f"{_DRAFTING}.hnorm",
    projection=f"{_DRAFTING}.eh_proj",
    norm=f"{_DRAFTING}.shared_head.norm",
    copies=(f"{_DRAFTING}.embed_tokens", f"{_DRAFTING}.shared_head.head"),
)


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``glm4_moe`` config; raises ValueError if it cannot be run."""
    fields = expert_fields(hf, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    config = build_config(
        hf,
        max_model_len=max_model_len,
        default_partial=0.5,
        qkv_bias=bool(hf.get("attention_bias", False)),
        qk_norm=fields.get("use_qk_norm", False),
    )
    routing = Routing(
        fields["n_routed_experts"],
        fields["num_experts_per_tok"],
        scores="sigmoid",
        normalised=fields.get("norm_topk_prob", True),
        scale=float(fields.get("routed_scaling_factor", 1.0)),
        groups=fields.get("n_group", 1),
        groups_per_token=fields.get("topk_group", 1),
        corrected=True,
    )
    size = fields["moe_intermediate_size"]
    return replace(
        config,
        experts=Experts(routing, size, shared_size=size * fields.get("n_shared_experts", 1)),
        dense_layers=tuple(range(min(config.num_layers, fields.get("first_k_dense_replace", 1)))),
        draft_layers=fields.get("num_nextn_predict_layers", 0),
    )


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    own = decoder_targets(config, shared_expert="shared_experts") | head_norms(config)
    return own | draft_head_targets(config, targets, DRAFT_HEAD)
