"""Phi-3 and Phi-3.5 mini and medium: joined projections in the files, LongRoPE (arXiv:2404.14219)."""

from __future__ import annotations

from typing import Any

from shadowkv.models.configs.config_json import build_config, window_of
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import Targets, decoder_targets

FIELDS = ("sliding_window",)


def config_from_hf(hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
    """ModelConfig of a ``phi3`` config; raises ValueError if it cannot be run.

    ``max_model_len`` decides LongRoPE's factors: the short set up to the original context, the long set beyond.
    """
    return build_config(hf, max_model_len=max_model_len, window=window_of(hf))


def targets(config: ModelConfig) -> Targets:
    """Names in the files -> parameters."""
    return decoder_targets(config, joined_qkv=True, joined_gate_up=True)
