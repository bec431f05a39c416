"""What cannot be loaded says why, with the names that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from families import build
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from shadowkv.kvcache.policy.shape import LayerKind
from shadowkv.layers.group import Group
from shadowkv.models import load_config, load_model
from shadowkv.models.sharding import Shard


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    build("llama", tmp_path)
    return tmp_path


def edit_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_weights(directory: Path, drop: str | None = None, **extra: torch.Tensor) -> None:
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **extra}
    tensors.pop(drop or "", None)
    save_file(tensors, file)


def test_missing_weights_are_named(llama: Path) -> None:
    edit_weights(llama, drop="model.layers.1.self_attn.k_proj.weight")
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(llama)


def test_unexpected_and_misshapen_weights_are_named_together(llama: Path) -> None:
    edit_weights(llama, **{"model.layers.0.extra.weight": torch.ones(3), "model.norm.weight": torch.ones(5)})
    with pytest.raises(ValueError) as raised:
        load_model(llama)
    assert "unexpected: model.layers.0.extra.weight" in str(raised.value)
    assert "shape: model.norm.weight is (5,), needs (48,)" in str(raised.value)


def test_derived_tensors_are_ignored(llama: Path) -> None:
    edit_weights(llama, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    load_model(llama)


def test_pickled_weights_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pickled weights only"):
        load_model(llama)


def test_missing_shard_is_named(llama: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
        load_model(llama)


def test_missing_tokenizer(llama: Path) -> None:
    (llama / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_model(llama)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mamba", "'mamba' is not supported; supported: llama, mistral"),
        ("qwen3_nexts", "'qwen3_nexts' is not supported; nearest: qwen3_next; supported: llama"),
        ("ministral", "'ministral' is not supported; nearest: mistral; supported: llama"),
    ],
)
def test_unknown_model_type(llama: Path, kind: str, said: str) -> None:
    edit_config(llama, model_type=kind)
    with pytest.raises(ValueError, match=f"{said}.*; use another model$"):
        load_config(llama)


@pytest.mark.parametrize("kind", ["dynamic", "axial"])
def test_unknown_rope_type(llama: Path, kind: str) -> None:
    edit_config(llama, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match=f"rope type '{kind}' is not supported"):
        load_config(llama)


def test_incomplete_rope(llama: Path) -> None:
    edit_config(llama, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match="lacks low_freq_factor, high_freq_factor"):
        load_config(llama)


def test_every_reason_at_once(llama: Path) -> None:
    edit_config(llama, vocab_size=..., hidden_act="gelu", mlp_bias=True)
    with pytest.raises(ValueError) as raised:
        load_config(llama)
    for reason in ("vocab_size is missing", "hidden_act='gelu'", "mlp_bias"):
        assert reason in str(raised.value)


def test_config_validation_lists_every_reason(llama: Path) -> None:
    edit_config(llama, num_key_value_heads=3, head_dim=15, eos_token_id=[2, 500])
    with pytest.raises(ValueError) as raised:
        load_config(llama)
    for reason in ("num_query_heads=4 is not a multiple", "15 rotating dimensions", r"[500]"):
        assert reason in str(raised.value)


def test_limit_beyond_the_model(llama: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len=300 is more than the 256 positions"):
        load_config(llama, max_model_len=300)
    assert load_config(llama, max_model_len=256).max_position == 256


def test_theta_override_takes_the_users_word(llama: Path) -> None:
    config = load_config(llama, max_model_len=4096, hf_overrides={"rope_theta": 4e6})
    assert config.max_position == 4096
    assert config.rope.theta == 4e6


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_a_window_is_one_only_of_longer_sequences(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    edit_config(tmp_path, sliding_window=64)
    for limit, kinds in ((None, (LayerKind(64),) * 2), (65, (LayerKind(64),) * 2), (64, ())):
        config = load_config(tmp_path, limit)
        assert config.layer_kinds == kinds
        assert config.max_position == 256
    edit_config(tmp_path, sliding_window=256)
    assert load_config(tmp_path).layer_kinds == ()


def test_yarn_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    build("qwen2-tied-yarn", tmp_path)
    edit_config(tmp_path, max_position_embeddings=64)
    assert load_config(tmp_path).max_position == 256


def test_eos_tokens_of_both_configs(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_config(llama).eos_token_ids == (2, 7)
    assert load_model(llama).tokenizer.eos_token_ids == {2, 7}


def test_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no known name"):
        load_model("llama-4-huge")
    with pytest.raises(FileNotFoundError, match="no known name"):
        load_model(tmp_path / "missing.gguf")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path)
    other = tmp_path / "notes.txt"
    other.write_text("")
    with pytest.raises(FileNotFoundError, match="neither a directory nor"):
        load_model(other)


def test_bad_options(llama: Path) -> None:
    with pytest.raises(ValueError, match="load_format='pickle'"):
        load_model(llama, load_format="pickle")
    with pytest.raises(ValueError, match="dtype='int8'"):
        load_model(llama, dtype="int8")
    with pytest.raises(ValueError, match="adapter has no meaning"):
        load_model(llama, load_format="dummy", adapter=llama)


def test_hub_downloads_no_pickled_files(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, allow_patterns: list[str], **_: str | None) -> str:
        asked.append((name, allow_patterns))
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_model("some-org/some-model.v1").name == "some-org/some-model.v1"
    assert load_config("some-org/some-model.v1").vocab_size == 96
    assert [name for name, _ in asked] == ["some-org/some-model.v1"] * 3
    config_first, weights, config_alone = (set(patterns) for _, patterns in asked)
    assert weights == {"*.safetensors", "*.json", "*.jinja"}
    assert config_first == config_alone >= {"config.json", "generation_config.json"}
    assert all(pattern.endswith("config.json") for pattern in config_alone)


def test_weights_of_what_cannot_be_run_are_not_downloaded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot_download(name: str, allow_patterns: list[str], **_: str | None) -> str:
        asked.append(allow_patterns)
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    edit_config(llama, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ValueError, match="'hqq'"):
        load_model("some-org/some-model")
    edit_config(llama, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="quantization='gptq': the files of some-org/some-model are in awq"):
        load_model("some-org/some-model", quantization="gptq")
    with pytest.raises(ValueError, match="llama models have no experts"):
        load_model("some-org/some-model", expert_parallel=True)
    with pytest.raises(ValueError, match="tensor_parallel_size=99 is more than the model's"):
        load_model("some-org/some-model", group=Group(0, 99))

    def refuse(shard: Shard) -> None:
        raise ValueError(f"no cache for {shard.config.architecture}")

    with pytest.raises(ValueError, match="no cache for"):
        load_model("some-org/some-model", check=refuse)
    assert len(asked) == 5 and not any("*.safetensors" in patterns for patterns in asked)


ANSWER = httpx.Response(404, request=httpx.Request("GET", "http://hub"))


@pytest.mark.parametrize(
    "failure, words",
    [
        (OSError("offline\nPlease check your connection."), "offline"),
        (RepositoryNotFoundError("404\n\nNot found", response=ANSWER), "there is no such model, or it is private .*"),
        (GatedRepoError("403\n\nAsk", response=ANSWER), "its terms must be agreed to .* must be set to a token"),
    ],
)
def test_hub_failure_is_clear(failure: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, allow_patterns: list[str], **_: str | None) -> str:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(OSError, match=f"not a local path, and the hub did not deliver it: {words}$"):
        load_model("some-org/some-model")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.2-3B-Instruct", "llama-3.2-3b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
    ],
)
def test_without_the_hub_a_known_config_is_named(name: str, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, allow_patterns: list[str], **_: str | None) -> str:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(OSError, match=f"offline; for a plan, the config of '{known}' is known here$"):
        load_config(name)
    assert load_config(known).num_layers > 0
