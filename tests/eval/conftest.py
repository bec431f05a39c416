"""A tiny model with random weights, whose tokens are bytes, and samples for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny_llama import write_config

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.models.loader import LoadedModel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny"), hidden_size=96, max_position_embeddings=8192)


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> LoadedModel:
    return load_from_config(EngineConfig(model=str(tiny), load_format="dummy", device="cpu"))


@pytest.fixture
def pipe() -> Iterator[Callable[[Path], str]]:
    """Returns the name of a pipe from which the text of a file can be read once, as with ``<(cat FILE)``."""
    with ExitStack() as stack:

        def opened(file: Path) -> str:
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            with open(writing, "wb") as end:
                end.write(file.read_bytes())
            return f"/dev/fd/{reading}"

        yield opened
