"""A tiny model with random weights, whose tokens are bytes, and samples for it."""

from __future__ import annotations

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
