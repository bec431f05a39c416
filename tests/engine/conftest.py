"""One SmolLM2 for all engine tests, and tiny models with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shadowkv import LLM
from shadowkv.engine.config import DEFAULT_MODEL, EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.loading import load_from_config
from shadowkv.models.loader import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return load_from_config(EngineConfig())


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(DEFAULT_MODEL, kv="shadowkv", kv_dense_below=0, max_num_seqs=24, max_model_len=4608)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def make(tiny: Path) -> Any:
    def build(**options: Any) -> Engine:
        # As on a GPU, and compressed as soon as can be.
        settings = {"max_num_seqs": 4, "max_cached_seqs": 2, "fetch_buffer": 2.0, "kv_dense_below": 0, **options}
        return Engine(EngineConfig(model=str(tiny), load_format="dummy", **settings))

    return build
