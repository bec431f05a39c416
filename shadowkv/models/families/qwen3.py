"""Qwen3 (dense): queries and keys are RMS-normalised per head, and projections have no biases (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from shadowkv.kvcache.policy.shape import FULL
from shadowkv.models.configs.config_json import build_config, window_of
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.families.qwen2 import FIRST_WINDOW
from shadowkv.models.weight_names import Targets, decoder_targets, head_norms

FIELDS = ("attention_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen3`` config; raises ValueError if it cannot be run."""
    bias = bool(hf.get("attention_bias", False))
    return build_config(
        {"head_dim": 128, **hf},
        max_model_len=max_model_len,
        window=window_of(hf) if hf.get("use_sliding_window") else FULL,
        first_window=hf.get("max_window_layers", FIRST_WINDOW),
        layer_types=hf.get("layer_types"),
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
    )


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return decoder_targets(config) | head_norms(config)
