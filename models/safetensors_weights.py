"""Weights of a Hugging Face directory: one .safetensors file or several with an index. Pickled files are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

_INDEX = "model.safetensors.index.json"


def stream_safetensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and CPU tensor of every weight, read one at a time.

    Raises FileNotFoundError where the directory has no safetensors or lacks files that its index names.
    """
    for file in _files(directory):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                yield name, opened.get_tensor(name)


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise FileNotFoundError(f"{directory} lacks weight files that its index names: {', '.join(missing)}")
        return [directory / name for name in names]
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickled:
        raise FileNotFoundError(
            f"{directory} has pickled weights only ({', '.join(pickled)}): loading them can run code; "
            "convert them to safetensors"
        )
    raise FileNotFoundError(f"{directory} has no .safetensors file")
