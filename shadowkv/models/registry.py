"""Model families by the ``model_type`` of their Hugging Face config; a family's module is imported on first use."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol, cast

from shadowkv.models.checkpoints.files import unsupported
from shadowkv.models.configs.config_json import FIELDS, plain_config
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.weight_names import DraftHeadNames, Targets

FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "phi3": "phi3",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "glm4_moe",
    "qwen3_5": "hybrids.qwen3_5",
    "qwen3_5_text": "hybrids.qwen3_5",
    "qwen3_5_moe": "hybrids.qwen3_5_moe",
    "qwen3_5_moe_text": "hybrids.qwen3_5_moe",
    "qwen3_next": "hybrids.qwen3_next",
    "nemotron_h": "hybrids.nemotron_h",
    "qwen4_exp": "hybrids.qwen4_exp",
    "qwen4_exp_text": "hybrids.qwen4_exp",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
    "gpt_oss": "gpt_oss",
    "minimax_m2": "minimax.minimax_m2",
    "minimax_m3_vl": "minimax.minimax_m3",
    "minimax_m3_vl_text": "minimax.minimax_m3",
}
"""model_type -> module of ``families``. A new family is one module and one line here."""


_OF_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.")
"""Names of those weights of a layer that only its keys and values need."""


class Family(Protocol):
    """The interface of a family's module.

    The module can also have a function ``text_weight``, and constants ``UNREAD``, ``INTERLEAVED_EXPERTS`` and
    ``DRAFT_HEAD``. This module's ``text_weight``, ``fields_of``, ``has_interleaved_experts`` and ``draft_head_names``
    say what these are.

    Attributes:
        FIELDS: fields of config.json that the family reads besides those that every family reads.
    """

    FIELDS: tuple[str, ...]

    def config_from_hf(self, hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
        """ModelConfig from the content of a config.json."""
        ...

    def targets(self, config: ModelConfig) -> Targets:
        """Names of the family's checkpoint tensors -> parameters."""
        ...


def family(model_type: str) -> Family:
    """Returns the family of ``model_type``. For an unknown one, raises ValueError that lists the known ones."""
    if model_type not in FAMILIES:
        raise ValueError(unsupported("model_type", model_type, FAMILIES))
    return cast(Family, import_module(f"shadowkv.models.families.{FAMILIES[model_type]}"))


def config_from_hf(hf: dict[str, Any], max_model_len: int | None = None) -> ModelConfig:
    """Returns the ModelConfig of a config.json's content; raises ValueError if it cannot be run. ``max_model_len``
    chooses LongRoPE's factors; ``ModelConfig.with_limits`` applies it as a limit."""
    return family(str(hf.get("model_type"))).config_from_hf(plain_config(hf), max_model_len)


def fields_of(model_type: str) -> tuple[str, ...]:
    """The fields of config.json that a family reads: those of every family except its ``UNREAD``, and its own."""
    own = family(model_type)
    unread: tuple[str, ...] = getattr(own, "UNREAD", ())
    return (*(name for name in FIELDS if name not in unread), *own.FIELDS)


def text_weight(config: ModelConfig) -> Callable[[str], str | None]:
    """Returns a function that maps a weight's name in the files to its name in the text model, or to None if the text
    model does not have it. It changes names only for multimodal families. Layers that attend to other layers' keys have
    no weights of keys and values, even if the files have some. A draft head uses the model's embedding and LM head, so
    copies of these in the files are not loaded."""
    renamed: Callable[[str], str | None] = getattr(family(config.architecture), "text_weight", str)
    names = draft_head_names(config.architecture) if config.draft_head else None
    of_head, copies = ((), ()) if names is None else (names.prefixes(config), names.copied(config))

    def read(name: str) -> str | None:
        if name.startswith(of_head):
            return None if name.startswith(copies) else name
        ours = renamed(name)
        own = None if ours is None else _OF_KEYS.match(ours)
        return None if own and config.reuses_keys(int(own[1])) else ours

    return read


def draft_head_names(model_type: str) -> DraftHeadNames | None:
    """Names of a draft head's weights in a family's files; None if the family has no draft head."""
    names: DraftHeadNames | None = getattr(family(model_type), "DRAFT_HEAD", None)
    return names


def with_draft_head(config: ModelConfig) -> ModelConfig:
    """Returns the config with a draft head. Raises ValueError if the files have none."""
    if draft_head_names(config.architecture) is None:
        able = ", ".join(name for name in FAMILIES if draft_head_names(name) is not None)
        raise ValueError(f"no layer that drafts tokens can be read from {config.architecture} models, only from {able}")
    if not config.draft_layers:
        raise ValueError("the config says that the files have no layer that drafts tokens")
    return replace(config, draft_head=True)


def has_interleaved_experts(model_type: str) -> bool:
    """Whether a family's safetensors files interleave experts, as gpt-oss's do (``checkpoints.experts``)."""
    return bool(getattr(family(model_type), "INTERLEAVED_EXPERTS", False))
