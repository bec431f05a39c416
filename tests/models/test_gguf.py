"""Models from GGUF files equal the same models from safetensors (SmolLM2 and transformers: engine/test_smollm2.py)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cache import packed_logits
from families import LONGROPE, build
from gguf_files import write_model
from test_families import sequences

from shadowkv.models import LoadedModel, load_config, load_model


def assert_equal_models(
    file: Path, directory: Path, max_model_len: int | None = None, overrides: dict[str, Any] | None = None
) -> None:
    ours = load_model(file, dtype=torch.float32, max_model_len=max_model_len, hf_overrides=overrides)
    reference = load_model(directory, dtype=torch.float32, max_model_len=max_model_len)
    pairs = zip(packed_logits(ours.model, sequences()), packed_logits(reference.model, sequences()), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "qwen3-tied", "phi3"])
def test_equals_safetensors(name: str, tmp_path: Path) -> None:
    model = build(name, tmp_path)
    assert_equal_models(write_model(tmp_path / "model.gguf", model), tmp_path)


def test_gemma3(tmp_path: Path) -> None:
    """Its norms have their 1 added already; its pattern of windows and the base of their RoPE are not in the file."""
    model = build("gemma3", tmp_path, {"query_pre_attn_scalar": 16})
    assert_equal_models(write_model(tmp_path / "model.gguf", model), tmp_path)
    model = build("gemma3-linear", tmp_path, {"query_pre_attn_scalar": 16})
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 500.0}
    file = write_model(tmp_path / "linear.gguf", model, **fields)
    kinds = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    ours, theirs = load_config(file, hf_overrides=kinds), load_config(tmp_path)
    assert (ours.rope, ours.layer_kinds) == (theirs.rope, theirs.layer_kinds)
    assert_equal_models(file, tmp_path, overrides=kinds)


def test_the_queries_of_gemma3_27b_are_scaled(tmp_path: Path) -> None:
    model = build("gemma3", tmp_path, {"num_hidden_layers": 62, "query_pre_attn_scalar": 12})
    file = write_model(tmp_path / "model.gguf", model)
    assert load_config(file).query_scale == load_config(tmp_path).query_scale == (16 / 12) ** 0.5


def test_rope_freqs_of_llama_3_1(tmp_path: Path) -> None:
    model = build("llama-3.1", tmp_path)
    rope = load_config(tmp_path).rope
    plain = rope.theta ** -(torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    divisors = (plain / rope.inverse_frequencies()).float()
    file = write_model(tmp_path / "model.gguf", model, {"rope_freqs.weight": divisors})
    assert_equal_models(file, tmp_path)


@pytest.mark.parametrize("max_model_len", [24, 256])
def test_longrope_factors_of_phi3(max_model_len: int, tmp_path: Path) -> None:
    model = build("phi3-longrope", tmp_path)
    factors = {
        "rope_factors_long.weight": torch.tensor(LONGROPE["long_factor"]),
        "rope_factors_short.weight": torch.tensor(LONGROPE["short_factor"]),
    }
    attention_factor = math.sqrt(1 + math.log(256 / 32) / math.log(32))
    fields = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": attention_factor}
    file = write_model(tmp_path / "model.gguf", model, factors, **fields)
    assert_equal_models(file, tmp_path, max_model_len)


@pytest.mark.parametrize("name", ["llama-linear", "llama-yarn"])
def test_rope_scaling(name: str, tmp_path: Path) -> None:
    model = build(name, tmp_path)
    fields = {"rope.scaling.type": name.removeprefix("llama-"), "rope.scaling.factor": 4.0}
    if name == "llama-yarn":
        fields |= {"rope.scaling.original_context_length": 64}
        fields |= {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}
    assert_equal_models(write_model(tmp_path / "model.gguf", model, **fields), tmp_path)


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    model = build("llama", tmp_path)
    file = write_model(tmp_path / "model.gguf", model, {"blk.0.attn_rel_b.weight": torch.ones(4)})
    with pytest.raises(ValueError, match=r"unexpected: blk\.0\.attn_rel_b\.weight"):
        load_model(file)
    model.config.model_type = "gemma"
    with pytest.raises(ValueError, match="'gemma' is not supported; nearest: gemma3; supported: llama"):
        load_model(write_model(tmp_path / "other.gguf", model))


def test_smollm2_config_needs_no_file(smollm2: LoadedModel) -> None:
    stated = load_config("smollm2-135m-instruct")
    assert stated.rms_norm_eps == pytest.approx(smollm2.config.rms_norm_eps)
    assert {**vars(stated), "rms_norm_eps": 0} == {**vars(smollm2.config), "rms_norm_eps": 0}
    assert smollm2.name == "smollm2-135m-instruct"
