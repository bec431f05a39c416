"""Reads the JSON files of a Hugging Face directory: the config, the format of the weights, and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shadowkv.models.checkpoints.files import ModelFileError, is_there, read_json
from shadowkv.models.checkpoints.quantized.format import Format
from shadowkv.models.configs.config_json import are_token_ids
from shadowkv.models.configs.model_config import ModelConfig
from shadowkv.models.overrides import overridden_config
from shadowkv.models.quantization import read_quantization

GENERATION_CONFIG = "generation_config.json"

NUMBERS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
"""Parameters of generation_config.json that are used, as in vLLM, and their types."""

OVERRIDES = (*NUMBERS, "seed")
"""Sampling parameters that a server can have its own defaults for."""


def read_sampling(directory: Path) -> dict[str, float]:
    """Sampling parameters that the model's authors recommend in generation_config.json; empty without that file.

    Raises ModelFileError for invalid values.
    """
    file = directory / GENERATION_CONFIG
    if not is_there(file):
        return {}
    recommended = {name: value for name, value in read_json(file).items() if name in NUMBERS and value is not None}
    for name, value in recommended.items():
        if type(value) not in (int, NUMBERS[name]) or not abs(value) < 2**31:
            raise ModelFileError(file, f"{name}={str(value)[:60]} is not a valid number", "correct or remove it")
    return recommended


def config_from_directory(
    path: Path, max_model_len: int | None, hf_overrides: Mapping[str, Any] | None
) -> tuple[ModelConfig, Format | None]:
    """Returns the config from config.json, and the format of the weights. The format is None for unquantized weights.
    The config's eos tokens include those of generation_config.json.

    Args:
        path: the directory, or a config.json alone.

    Raises FileNotFoundError without a config.json, ModelFileError if a file is wrong or the model cannot be run, and
    SettingsError if it cannot be run with the overrides.
    """
    file = path / "config.json" if path.is_dir() else path
    if not is_there(file):
        raise FileNotFoundError(f"{path} has no config.json")
    hf = read_json(file)
    format = read_quantization(file, hf)
    config = overridden_config(file, hf, max_model_len, hf_overrides)
    generation = file.with_name(GENERATION_CONFIG)
    if path.is_dir() and is_there(generation):
        eos = read_json(generation).get("eos_token_id")
        stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not are_token_ids(stops) or not all(0 <= token < config.vocab_size for token in stops):
            raise ModelFileError(generation, f"eos_token_id={str(eos)[:60]} is not among {config.vocab_size} tokens")
        config = replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *stops])))
    return config, format
