"""Whole models on policies that attend to every token in a codec's format."""

from __future__ import annotations

import json

import pytest
import torch
from session import Session

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.kvcache.presets import CACHE_DTYPES, preset
from shadowkv.models.loader import LoadedModel

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 256,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(400)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """With heads of 64 dimensions, which all codecs take."""
    directory = tmp_path_factory.mktemp("wide")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return load_from_config(EngineConfig(model=str(directory), load_format="dummy"))


def test_generated_tokens_are_coded_too_and_logits_stay_close(wide: LoadedModel) -> None:
    picked, wanted = zip(*Session(wide, preset("full"), 520).greedy(PROMPT, 24))
    exact, error = torch.stack(wanted), {}
    for kv in ("fp8", "turboquant_k8v4", "turboquant-4", "polar-int4", "turboquant-3", "tq3_0"):
        session = Session(wide, preset(CACHE_DTYPES.get(kv, kv)), 520)
        found = session.force(PROMPT, list(picked))
        assert session.sequence is not None and session.sequence.compressed == 384, "a page is compressed on the way"
        assert torch.equal(found[0], exact[0]), "prefill is exact"
        error[kv] = ((found - exact).norm() / exact.norm()).item()
    print(f"relative errors of logits: {error}")
    assert 0 < error["fp8"] < error["turboquant_k8v4"] < error["turboquant-4"] < error["turboquant-3"] < 0.4, error
