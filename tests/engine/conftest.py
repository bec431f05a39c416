"""One SmolLM2 for all engine tests."""

from __future__ import annotations

import pytest

from shadowkv import LLM
from shadowkv.engine.config import DEFAULT_MODEL, EngineConfig
from shadowkv.engine.loading import load_from_config
from shadowkv.models.loader import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return load_from_config(EngineConfig())


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(DEFAULT_MODEL, kv="shadowkv", max_num_seqs=24, max_model_len=4608)
