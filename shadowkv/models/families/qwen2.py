"""Qwen2 and Qwen2.5: Llama with biases of the q, k and v projections (arXiv:2407.10671)."""

from __future__ import annotations

from typing import Any

from shadowkv.kvcache.policy.shape import FULL
from shadowkv.models.configs.config_json import build_config, window_of
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import Targets, decoder_targets

FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

FIRST_WINDOW = 28
"""Default of ``max_window_layers``, the number of layers before the first one with a window, as in Transformers."""


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``qwen2`` config; raises ValueError if it cannot be run."""
    return build_config(
        hf,
        max_model_len=max_model_len,
        # Every config states the window, but all released ones switch it off.
        window=window_of(hf) if hf.get("use_sliding_window") else FULL,
        first_window=hf.get("max_window_layers", FIRST_WINDOW),
        layer_types=hf.get("layer_types"),
        qkv_bias=True,
    )


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return decoder_targets(config)
