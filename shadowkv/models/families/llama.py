"""Llama 2, 3 and 3.1, Mistral, Yi and SmolLM2: the plain decoder (arXiv:2302.13971)."""

from __future__ import annotations

from typing import Any

from shadowkv.models.configs.config_json import build_config, window_of
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import Targets, decoder_targets

FIELDS = ("attention_bias", "sliding_window")


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``llama`` or ``mistral`` config; raises ValueError if it cannot be run."""
    bias = bool(hf.get("attention_bias", False))
    return build_config(
        hf,
        max_model_len=max_model_len,
        window=window_of(hf),
        qkv_bias=bias,
        attention_out_bias=bias,
    )


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return decoder_targets(config)
