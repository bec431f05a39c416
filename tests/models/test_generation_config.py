"""generation_config.json: sampling that a model's authors advise; ``--generation-config`` says whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bad_files import edit_json, write_directory

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.startup.loading import checked_defaults, load_from_config, sampling_of_directory
from shadowkv.models.directory import GENERATION_CONFIG, read_sampling

ADVISED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_directory(tmp_path / "tiny")
    edit_json(directory / GENERATION_CONFIG, **ADVISED, min_p=None, do_sample=True, max_length=50)
    return directory


def test_an_engine_takes_the_models_own_unless_told_otherwise(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / GENERATION_CONFIG).write_text('{"temperature": 0}')
    settings = {"model": str(model), "max_num_seqs": 1, "max_cached_seqs": 0, "max_model_len": 64, "kv": "full"}
    loaded = load_from_config(EngineConfig(**settings))
    for name, wanted in (("auto", ADVISED), ("vllm", {}), (str(other), {"temperature": 0})):
        engine = Engine(EngineConfig(**settings, generation_config=name), loaded)
        assert engine.sampling_defaults == wanted
        assert any(GENERATION_CONFIG in line for line in engine.notes) == bool(wanted)


@pytest.mark.parametrize("value", ["1", True, [1], float("nan"), 10**400])
def test_what_is_no_number_is_refused(value: Any, model: Path) -> None:
    edit_json(model / GENERATION_CONFIG, top_k=value)
    with pytest.raises(ValueError, match=r"generation_config.json: top_k=.* is not a valid number"):
        read_sampling(model)


def test_what_no_request_may_ask_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"top_p=0 must be in \(0, 1\]; .*generation_config='vllm'"):
        checked_defaults({"top_p": 0}, {})
    with pytest.raises(ValueError, match="neither 'auto', 'vllm' nor a directory with"):
        sampling_of_directory(str(tmp_path))
