"""``--generation-config``: sampling parameters for requests that do not set their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.models.generation_config import GENERATION_CONFIG, read_sampling
from shadowkv.wording import SettingsError


def sampling_of_directory(name: str) -> dict[str, Any] | None:
    """What ``--generation-config`` gives instead of the model's own file; None for that one ("auto").

    Raises ValueError for a directory without such a file, or with one that cannot be used.
    """
    if name == "auto":
        return None
    if name == "vllm":
        return {}
    directory = Path(name).expanduser()
    if not (directory / GENERATION_CONFIG).is_file():
        reason = f"is neither 'auto', 'vllm' nor a folder with {GENERATION_CONFIG}"
        raise SettingsError(f"generation_config={name!r} {reason}", ["generation_config"])
    return read_sampling(directory)


def checked(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults``, if a request may ask for them; raises ValueError."""
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        remedy = "correct it, or leave it out with generation_config='vllm'"
        raise SettingsError(f"{GENERATION_CONFIG}: {error}; {remedy}", ["generation_config"]) from error
    return dict(defaults)


def in_words(defaults: Mapping[str, Any]) -> list[str]:
    """Lines for the start of a server."""
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return [f"sample  {values} where a request does not say ({GENERATION_CONFIG})"] if defaults else []
