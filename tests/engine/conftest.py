"""One SmolLM2 for all engine tests, and tiny models with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import write_config

from shadowkv import LLM
from shadowkv.engine.config import DEFAULT_MODEL, EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.models.loader import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return load_from_config(EngineConfig())


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(DEFAULT_MODEL, kv="shadowkv", kv_dense_below=0, max_num_seqs=24, max_model_len=4608)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny"), hidden_size=48, max_position_embeddings=2048)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs prompts without a clock."""
    for name in ("TOKEN_GAP", "QUEUED_TOKEN_GAP", "PACKED_TOKEN_GAP", "IDLE_PREFILL_SECONDS"):
        monkeypatch.setattr(f"shadowkv.engine.engine.{name}", 1e6)


@pytest.fixture
def make(tiny: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def build(**options: Any) -> Engine:
        # As on a GPU, and compressed as soon as can be.
        settings = {"max_num_seqs": 4, "max_cached_seqs": 2, "fetch_buffer": 2.0, "kv_dense_below": 0, **options}
        made.append(Engine(EngineConfig(model=str(tiny), load_format="dummy", **settings)))
        return made[-1]

    yield build
    for engine in made:  # what matches their grammars is a process
        engine.requests.grammars.pool.close()
