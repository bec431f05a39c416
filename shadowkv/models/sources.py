"""Where a model comes from: catalogue name, directory, GGUF file or hub id -> a path on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from shadowkv.models.catalogue import CATALOGUE, config_file, fetch
from shadowkv.models.checkpoints.quantization import SEPARATE_FILES
from shadowkv.models.files import check_regular, is_there

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_CONFIG_FILES = ["config.json", "generation_config.json", *SEPARATE_FILES]


def resolve(source: str | Path, *, weights: bool) -> Path:
    """A .gguf file, a directory, or the .json config of a catalogue model that has only that.

    Args:
        source: what the user named.
        weights: whether weights are needed; without them nothing large is downloaded.

    Raises FileNotFoundError if it is none of those, ValueError if a catalogue model has no weights or a .gguf is a
    folder, OSError if a download fails.
    """
    name = str(source)
    if name in CATALOGUE:
        return fetch(name) if weights else config_file(name)
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and is_there(path):
        check_regular(path)
        return path
    if path.is_dir():
        return path
    if path.is_file():
        raise FileNotFoundError(f"{path} is neither a directory nor a .gguf file")
    if is_hub_id(source):
        return _from_hub(name, weights)
    raise FileNotFoundError(
        f"{name!r} is no directory, no .gguf file, no hub id (org/name) and no known name ({', '.join(CATALOGUE)})"
    )


def is_hub_id(source: str | Path) -> bool:
    """Whether it is fetched from the hub: it has that form, and is neither a known name nor a path on this machine."""
    name, path = str(source), Path(source).expanduser()
    return bool(_HUB_ID.match(name)) and name not in CATALOGUE and path.suffix != ".gguf" and not path.exists()


def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    # Never pickled files: they can run code.
    patterns = ["*.safetensors", "*.json", "*.jinja"] if weights else _CONFIG_FILES
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        reason = _reason(error)
        raise OSError(f"{name!r} is no local path, and the hub did not deliver it: {reason}") from error


def _reason(error: Exception) -> str:
    """The hub's message, in one line; in most errors, further lines only refer to other places."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "its terms must be agreed to on its page there, and a token passed as HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or it is private and a token is needed as HF_TOKEN"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
