"""A tiny model with random weights, whose tokens are bytes, and samples for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.loading import load_from_config
from shadowkv.models.loader import LoadedModel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> LoadedModel:
    return load_from_config(EngineConfig(model=str(tiny), load_format="dummy", device="cpu"))
