"""An adapter that is corrupt or of another kind ends in one line with its file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import HIDDEN, LAYER, Serve, assert_refused, edit_json, edit_tensors, write_directory
from safetensors.torch import save_file

CONFIGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULE = f"base_model.model.{LAYER}.self_attn.o_proj"
A, B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / CONFIGS).write_text(json.dumps(config))
    save_file({A: torch.ones(4, HIDDEN), B: torch.ones(HIDDEN, 4)}, folder / WEIGHTS)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "tiny")


def test_the_good_adapter_is_good(adapter: Path, model: Path, serve: Serve) -> None:
    code, stderr = serve(model, "--adapter", str(adapter))
    assert code == 0, stderr


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000], ids=lambda c: str(c[:9]))
@pytest.mark.parametrize("file", [CONFIGS, WEIGHTS])
def test_a_corrupt_file_is_refused(file: str, content: bytes, adapter: Path, model: Path, serve: Serve) -> None:
    (adapter / file).write_bytes(content)
    assert_refused(serve(model, "--adapter", str(adapter)), file)


NAN = float("nan")
FIELDS: list[tuple[str, Any]] = [
    *(("r", value) for value in (..., None, 0, -4, 4.0, "4", [4], True, 10**30, 5)),
    *(("lora_alpha", value) for value in (..., None, NAN, "8", [8], 10**400)),
    *(("use_rslora", value) for value in ("yes", 3)),
    *(("target_modules", value) for value in (3, [3], {}, [["o_proj"]], ["q_proj"])),
    *(("peft_type", value) for value in (..., "IA3", [])),
    ("bias", "all"),
    ("bias", ["none"]),
    ("rank_pattern", {"x": 3}),
]


@pytest.mark.parametrize(("key", "value"), FIELDS, ids=str)
def test_a_bad_field_is_named(key: str, value: Any, adapter: Path, model: Path, serve: Serve) -> None:
    edit_json(adapter / CONFIGS, **{key: value})
    answer = serve(model, "--adapter", str(adapter))
    assert_refused(answer, str(adapter), "rank 4" if (key, value) == ("r", 5) else key)


TENSORS: dict[str, dict[str, torch.Tensor | None]] = {
    "no B": {B: None},
    "no tensors": {A: None, B: None},
    "scalar": {A: torch.tensor(1.0)},
    "one dimension": {B: torch.ones(HIDDEN * 4)},
    "three dimensions": {A: torch.ones(4, HIDDEN, 1)},
    "another rank": {A: torch.ones(2, HIDDEN)},
    "another width": {A: torch.ones(4, HIDDEN + 1)},
    "integers": {A: torch.ones(4, HIDDEN, dtype=torch.int32)},
    "no such layer": {
        A.replace("layers.0", "layers.7"): torch.ones(4, HIDDEN),
        B.replace("layers.0", "layers.7"): torch.ones(HIDDEN, 4),
    },
    "of no module": {"x": torch.ones(1)},
}


@pytest.mark.parametrize("name", TENSORS)
def test_matrices_that_do_not_fit_are_refused(name: str, adapter: Path, model: Path, serve: Serve) -> None:
    edit_tensors(adapter / WEIGHTS, **TENSORS[name])
    assert_refused(serve(model, "--adapter", str(adapter)), str(adapter))


@pytest.mark.parametrize("file", [CONFIGS, WEIGHTS])
def test_a_directory_in_place_of_a_file(file: str, adapter: Path, model: Path, serve: Serve) -> None:
    (adapter / file).unlink()
    (adapter / file).mkdir()
    assert_refused(serve(model, "--adapter", str(adapter)), file)
