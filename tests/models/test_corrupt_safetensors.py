"""Weights that are corrupt, do not fit, or point out of their folder end in one line with the file's name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import HIDDEN, LAYER, SHAPES, Serve, assert_refused, edit_tensors, write_directory
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, OUT = "model.norm.weight", f"{LAYER}.self_attn.o_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "tiny")


def header(**changes: Any) -> Callable[[bytes], bytes]:
    """Changes what the header says of one tensor, the norm's."""

    def change(content: bytes) -> bytes:
        length = struct.unpack("<Q", content[:8])[0]
        stated = json.loads(content[8 : 8 + length])
        stated[NORM] |= changes
        raw = json.dumps(stated).encode()
        return struct.pack("<Q", len(raw)) + raw + content[8 + length :]

    return change


def replaced(raw: bytes, length: int | None = None) -> Callable[[bytes], bytes]:
    """A header of these bytes, which says that it is so long."""
    return lambda content: struct.pack("<Q", len(raw) if length is None else length) + raw


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "truncated in the header": lambda content: content[:100],
    "truncated in the data": lambda content: content[:-1],
    "bytes left over": lambda content: content + b"x",
    "header length past the end": replaced(b"{}", 1 << 20),
    "header length 2^63": replaced(b"{}", 1 << 63),
    "header that is no JSON": replaced(b"{nope"),
    "header that is a list": replaced(b"[]"),
    "header that is no UTF-8": replaced(b'{"\xff": 1}'),
    "header nested 10^5 deep": replaced(b"[" * 100_000),
    "header of 8 MiB of blanks": replaced(b" " * (8 << 20)),
    "no tensors": replaced(b"{}"),
    "offsets past the end": header(data_offsets=[0, 1 << 40]),
    "offsets the wrong way round": header(data_offsets=[128, 0]),
    "offsets that overlap": header(data_offsets=[64, 192]),
    "negative offsets": header(data_offsets=[-128, 0]),
    "unknown dtype": header(dtype="F99"),
    "dtype of other width": header(dtype="F16"),
    "dtype of integers": header(dtype="I32"),
    "shape whose product overflows": header(shape=[1 << 40, 1 << 40]),
    "shape of zero": header(shape=[0, 1 << 62]),
    "negative shape": header(shape=[-HIDDEN]),
    "shape that is a text": header(shape="32"),
    "shape of 2^64": header(shape=[1 << 64]),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_corrupt_file_is_refused(name: str, model: Path, serve: Serve) -> None:
    file = model / WEIGHTS
    file.write_bytes(CONTENTS[name](file.read_bytes()))
    assert_refused(serve(model), WEIGHTS)


TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({OUT: None}, f"missing: {OUT}"),
    "unexpected": ({"model.extra.weight": torch.ones(3)}, "unexpected: model.extra.weight"),
    "wrong shape": ({NORM: torch.ones(5)}, f"{NORM} is (5,), needs ({HIDDEN},)"),
    "as many in another shape": ({OUT: torch.ones(HIDDEN * 2, HIDDEN // 2)}, OUT),
    "integers": ({NORM: torch.ones(HIDDEN, dtype=torch.int64)}, NORM),
    "bytes": ({NORM: torch.ones(HIDDEN, dtype=torch.uint8)}, NORM),
    "scalar": ({NORM: torch.tensor(1.0)}, NORM),
    "hundreds unexpected": ({f"x{i}": torch.ones(1) for i in range(300)}, "more"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused(name: str, model: Path, serve: Serve) -> None:
    changes, reason = TENSORS[name]
    edit_tensors(model / WEIGHTS, **changes)
    assert_refused(serve(model), str(model), reason)


def map_to(name: object) -> str:
    return json.dumps({"weight_map": {weight: name for weight in SHAPES}})


INDICES: dict[str, str | bytes] = {
    "out of the folder": map_to("../outside.safetensors"),
    "../../etc/passwd": map_to("../../etc/passwd"),
    "absolute": map_to("/etc/passwd"),
    "absolute and safetensors": map_to("/tmp/model.safetensors"),
    "in a folder below": map_to("below/model.safetensors"),
    "backslashes": map_to("..\\model.safetensors"),
    "the folder above": map_to(".."),
    "another file of the folder": map_to("config.json"),
    "a missing file": map_to("model-00001-of-00002.safetensors"),
    "a directory": map_to("folder.safetensors"),
    "an empty name": map_to(""),
    "a name with a null": map_to("a\0.safetensors"),
    "a number": map_to(3),
    "a list": map_to(["model.safetensors"]),
    "a list as map": json.dumps({"weight_map": ["model.safetensors"]}),
    "no map": json.dumps({}),
    "an empty map": json.dumps({"weight_map": {}}),
    "a list as index": "[]",
    "no JSON": "{",
    "nothing": "",
    "no UTF-8": b"\xff\xfe",
    "100,000 deep": "[" * 100_000,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", INDICES)
def test_an_index_names_files_of_its_folder_alone(name: str, model: Path, serve: Serve) -> None:
    content = INDICES[name]
    (model / "below").mkdir()
    (model / "folder.safetensors").mkdir()
    for elsewhere in (model.parent / "outside.safetensors", model / "below" / WEIGHTS):
        elsewhere.write_bytes((model / WEIGHTS).read_bytes())  # good ones: they must not be reached all the same
    (model / INDEX).write_bytes(content.encode() if isinstance(content, str) else content)
    assert_refused(serve(model), INDEX)


def test_symlinks_as_in_the_hubs_cache(model: Path, serve: Serve) -> None:
    blob = model.parent / "blobs" / "1234"
    blob.parent.mkdir()
    (model / WEIGHTS).rename(blob)
    (model / WEIGHTS).symlink_to("../blobs/1234")
    (model / INDEX).write_text(map_to(WEIGHTS))
    code, stderr = serve(model)
    assert code == 0, stderr
    blob.unlink()
    assert_refused(serve(model), WEIGHTS)


def test_a_tensor_in_two_files_is_refused(model: Path, serve: Serve) -> None:
    save_file({NORM: torch.zeros(HIDDEN)}, model / "model-2.safetensors")
    assert_refused(serve(model), WEIGHTS, NORM)
    (model / "model-2.safetensors").unlink()
    tensors = load_file(model / WEIGHTS)
    save_file({NORM: tensors.pop(NORM)}, model / "model-2.safetensors")
    save_file(tensors, model / WEIGHTS)
    code, stderr = serve(model)
    assert code == 0, stderr


def test_a_directory_in_place_of_weights(model: Path, serve: Serve) -> None:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).mkdir()
    assert_refused(serve(model), WEIGHTS)
