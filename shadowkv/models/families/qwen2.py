"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v (arXiv:2407.10671)."""

from __future__ import annotations

from typing import Any

from shadowkv.models.configs.config_json import build_config
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.families.weight_names import Targets, decoder_targets

FIELDS = ("sliding_window", "use_sliding_window", "layer_types")


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen2`` config; raises ValueError where it cannot be run."""
    # Every config states the window, but all released ones switch it off.
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    types = hf.get("layer_types")
    return build_config(hf, max_model_len=max_model_len, sliding_window=window, layer_types=types, qkv_bias=True)


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return decoder_targets(config)
