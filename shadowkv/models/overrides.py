"""Applies the user's ``hf_overrides`` to a model's config. Entries are named as in config.json, also for GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shadowkv.models.checkpoints.files import OTHER_MODEL, ModelFileError, join_reasons
from shadowkv.models.configs.config_json import ROPE_OBJECTS, plain_config
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.configs.rope import unread_fields
from shadowkv.models.registry import config_from_hf, fields_of
from shadowkv.wording import SettingsError

_BASE = ("rope_theta", "partial_rotary_factor")
"""Fields of RoPE itself, not of its scaling. Configs have them in RoPE's object or at the top level."""


def overridden_config(
    file: Path, hf: dict[str, Any], max_model_len: int | None, overrides: Mapping[str, Any] | None
) -> ModelConfig:
    """Returns the ModelConfig of ``hf``, the content of ``file``. Entries of ``overrides`` replace those of ``hf``, and
    ``max_model_len`` limits the longest sequence.

    Raises ModelFileError if the model cannot be run. Raises SettingsError if it cannot be run with overrides, or if
    ``max_model_len`` is too long.
    """
    overrides = overrides or {}
    try:
        config = config_from_hf(_overridden(plain_config(hf), overrides), max_model_len)
    except ValueError as error:
        if not overrides:
            raise ModelFileError(file, str(error), OTHER_MODEL) from error
        raise SettingsError(f"hf_overrides on {file}: {error}", ["hf_overrides"]) from error
    return config.with_limits(max_model_len, overrides.get("rope_theta") is not None)


def _overridden(hf: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``hf`` with entries replaced; raises ValueError for entries of ``overrides`` that would not be read.

    As in vLLM, an object in ``overrides`` replaces the file's whole object. RoPE's object has two names. An override
    under either name replaces the file's objects under both. The file's ``rope_theta`` and ``partial_rotary_factor``
    stay unless an override has them.
    """
    _check(hf, overrides)
    objects = {name: hf[name] for name in ROPE_OBJECTS if isinstance(hf.get(name), dict)}
    result = {**hf, **overrides}
    rope = next((name for name in ROPE_OBJECTS if name in overrides), None)
    if rope is None:  # fields in the file's RoPE object would take precedence over overrides at the top level
        for name, entries in objects.items():
            result[name] = {field: value for field, value in entries.items() if field not in overrides}
        return result
    base = {field: entries[field] for entries in objects.values() for field in _BASE if entries.get(field) is not None}
    result |= {**base, **overrides, **dict.fromkeys(ROPE_OBJECTS), rope: overrides[rope]}
    if isinstance(overrides[rope], dict) and "original_max_position_embeddings" in overrides[rope]:
        result["original_max_position_embeddings"] = None  # the file's value would take precedence
    return result


def _check(hf: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    architecture = str(hf.get("model_type"))
    known = fields_of(architecture)
    unknown = [str(name) for name in overrides if name not in known]
    if unknown:
        raise ValueError(f"{architecture} models read no {', '.join(unknown)}; they read {', '.join(known)}")
    named = [name for name in ROPE_OBJECTS if name in overrides]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} are two names of one object; pass one of them")
    reasons = []
    for name in named:
        if isinstance(overrides[name], dict):  # values of other types are refused later, as in files
            reasons += unread_fields(overrides[name])
            twice = [field for field in overrides[name] if field in overrides]
            reasons += [f"{field} occurs twice, in {name} and beside it" for field in twice]
    if reasons:
        raise ValueError(join_reasons(reasons))
