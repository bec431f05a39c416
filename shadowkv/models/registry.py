"""Model families by the ``model_type`` of their Hugging Face config; a family's module is imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

from shadowkv.models.checkpoints.files import unsupported
from shadowkv.models.configs.config_json import plain_config
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.families.weight_names import Targets

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
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt_oss",
    "minimax_m2": "minimax_m2",
}
"""model_type -> module of ``families``. A new family is one module and one line here."""


class Family(Protocol):
    """The interface of a family's module.

    It can also have a function ``text_weight`` and a constant ``INTERLEAVED_EXPERTS`` (see
    ``has_interleaved_experts``).

    Attributes:
        FIELDS: fields of config.json that it reads besides those of every family.
    """

    FIELDS: tuple[str, ...]

    def config_from_hf(self, hf: dict[str, Any], max_model_len: int | None) -> ModelConfig:
        """ModelConfig from the content of a config.json."""
        ...

    def targets(self, config: ModelConfig) -> Targets:
        """Names of the family's checkpoint tensors -> parameters."""
        ...


def family(model_type: str) -> Family:
    """The family of ``model_type``; raises ValueError with the nearest and all known ones if there is none."""
    if model_type not in FAMILIES:
        raise ValueError(unsupported("model_type", model_type, FAMILIES))
    return cast(Family, import_module(f"shadowkv.models.families.{FAMILIES[model_type]}"))


def config_from_hf(hf: dict[str, Any], max_model_len: int | None = None) -> ModelConfig:
    """ModelConfig from the content of a config.json; raises ValueError. It does not apply the user's limits."""
    return family(str(hf.get("model_type"))).config_from_hf(plain_config(hf), max_model_len)


def text_weight(model_type: str) -> Callable[[str], str | None]:
    """For multimodal families, a function that maps names in the files to the text model's names, and other weights'
    names to None. For other families, the identity."""
    renamed: Callable[[str], str | None] = getattr(family(model_type), "text_weight", str)
    return renamed


def has_interleaved_experts(model_type: str) -> bool:
    """Whether a family's safetensors files interleave experts, as gpt-oss's do (``checkpoints.experts``)."""
    return bool(getattr(family(model_type), "INTERLEAVED_EXPERTS", False))
