"""generation_config.json: the sampling parameters that a model's authors recommend."""

from __future__ import annotations

from pathlib import Path

from shadowkv.models.files import ModelFileError, is_there, read_json

GENERATION_CONFIG = "generation_config.json"

NUMBERS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
"""The parameters that are used from it, as in vLLM, and their types."""


def read_sampling(directory: Path) -> dict[str, float]:
    """Sampling parameters in a directory's file, none without a file; raises ModelFileError."""
    file = directory / GENERATION_CONFIG
    if not is_there(file):
        return {}
    given = {name: value for name, value in read_json(file).items() if name in NUMBERS and value is not None}
    for name, value in given.items():
        if type(value) not in (int, NUMBERS[name]) or not abs(value) < 2**31:
            raise ModelFileError(file, f"{name}={str(value)[:60]} is no number of its kind", "correct or remove it")
    return given
