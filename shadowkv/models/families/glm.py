"""GLM-4 9B (``glm``) and GLM-4-0414 (``glm4``): half of each head rotates, in interleaved pairs (arXiv:2406.12793).

``glm4`` also normalises the outputs of attention and MLP before they join the residual stream.
"""

from __future__ import annotations

from typing import Any

from shadowkv.models.configs.config_json import build_config
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import Targets, decoder_targets, rows

FIELDS = ("attention_bias",)


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``glm`` or ``glm4`` config; raises ValueError if it cannot be run."""
    return build_config(
        {"head_dim": 128, **hf},
        max_model_len=max_model_len,
        default_partial=0.5,
        interleaved=True,
        qkv_bias=bool(hf.get("attention_bias", True)),
        post_norms=hf["model_type"] == "glm4",
    )


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    result = decoder_targets(config, joined_gate_up=True)
    if config.post_norms:
        for layer in range(config.num_layers):
            for theirs, ours in (("self_attn", "attention"), ("mlp", "mlp")):
                name = f"model.layers.{layer}.post_{theirs}_layernorm"
                result |= rows(name, f"layers.{layer}.post_{ours}_norm", 0, config.hidden_size)
    return result
