"""Weights are counted before any is read or made: what does not fit is refused with both numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from gguf_files import write_model
from test_adapter import random_pairs, write_adapter

from shadowkv.models import load_model, loader

GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes are free."""

    def say(count: int) -> None:
        monkeypatch.setattr(loader, "free_bytes", lambda device: count)

    return say


@pytest.fixture
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("weights were made or read")

    for name in ("fill", "fill_dummy"):
        monkeypatch.setattr(loader, name, fail)


@pytest.mark.parametrize(
    "name, dtype, need, advice",
    [
        ("llama-3.1-8b", "float32", "29.92", "pass dtype='bfloat16', use a smaller model or free memory"),
        ("llama-3.1-70b", "float32", "262.83", "use a smaller model or free memory"),
        ("llama-3.1-70b", "bfloat16", "131.42", "use a smaller model or free memory"),
    ],
)
def test_dummy_weights(
    free: Callable[[int], None], nothing_is_made: None, name: str, dtype: str, need: str, advice: str
) -> None:
    free(20 * GIB)
    with pytest.raises(MemoryError, match=rf"need {need} GiB as {dtype} on cpu, 20\.00 GiB are free; {advice}$"):
        load_model(name, load_format="dummy", dtype=dtype)


def test_quantized_weights(free: Callable[[int], None], nothing_is_made: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "unfit", lambda device, dtype: None)
    free(8 * GIB)
    with pytest.raises(MemoryError, match=r"need 8\.46 GiB as bfloat16, fp8 weights on cpu, 8\.00 GiB are free"):
        load_model("llama-3.1-8b", load_format="dummy", dtype="bfloat16", quantization="fp8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["safetensors", "gguf", "dummy", "adapter"])
@pytest.mark.parametrize("case", ["llama", "llama-tied"])
def test_the_weights_and_no_byte_more_must_fit(
    free: Callable[[int], None], request: pytest.FixtureRequest, tmp_path: Path, case: str, source: str, dtype: str
) -> None:
    model = build(case, tmp_path)
    options: dict[str, Any] = {"dtype": dtype}
    path = tmp_path
    if source == "gguf":
        path = write_model(tmp_path / "model.gguf", model)
    if source == "adapter":
        pairs = {name: tensor for name, tensor in random_pairs().items() if ".q_proj." in name}
        options["adapter"] = write_adapter(tmp_path / "adapter", pairs)
    if source == "dummy":
        options["load_format"] = "dummy"
    width = getattr(torch, dtype).itemsize
    need = width * sum(parameter.numel() for parameter in model.parameters())  # transformers counts tied ones once too
    free(need)
    assert load_model(path, **options).model.num_bytes == need
    free(need - 1)
    request.getfixturevalue("nothing_is_made")
    with pytest.raises(MemoryError, match=f"as {dtype} on cpu"):
        load_model(path, **options)
