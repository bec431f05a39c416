"""A config that is no JSON, lacks fields or has absurd ones ends in one line with its file's name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from bad_files import CONFIG, Serve, assert_refused, edit_json, write_directory

CONFIGS, GENERATION = "config.json", "generation_config.json"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "tiny")


FIELDS: list[dict[str, Any]] = [
    *({"hidden_size": value} for value in (..., None, 0, -32, 32.0, 32.5, "32", True, [32], {}, NAN, 10**30, 2**31)),
    *({"num_hidden_layers": value} for value in (0, -1, 2, 10**9, "1", 1.0)),
    *({"num_attention_heads": value} for value in (0, -2, 3, 10**9, None)),
    *({"num_key_value_heads": value} for value in (-1, 3, "2", 2.0)),
    *({"head_dim": value} for value in (-16, 15, 10**9, "16")),
    *({"vocab_size": value} for value in (0, -1, 10**12, 97)),
    *({"intermediate_size": value} for value in (0, 10**15, 1e3)),
    *({"max_position_embeddings": value} for value in (0, -1, 1 << 40, "256")),
    *({"rms_norm_eps": value} for value in (NAN, INFINITE, -1, 0, "1e-5", 10**400, [])),
    *({"rope_theta": value} for value in (NAN, INFINITE, -1.0, 1e-300, 1.0, "1e4", [])),
    *({"model_type": value} for value in (..., None, "mamba", 3, ["llama"], {}, "../llama", "config")),
    *({"eos_token_id": value} for value in ("2", 2.0, [2, "x"], {}, -1, 96, [[2]], True)),
    *({"hidden_act": value} for value in ("gelu", 3, ["silu"], {})),
    *({"tie_word_embeddings": value} for value in ("false", 1, [])),
    *({"attention_bias": value} for value in ("no", 2)),
    *({"max_window_layers": value} for value in ("64", -1, 1.5, [], 10**30)),
    *({"sliding_window": value} for value in ("64", -1, 1.5, [], 10**30)),
    *({"partial_rotary_factor": value} for value in (NAN, -1, 2.0, 1e-9, "x")),
    {"bos_token_id": "x"},
    {"mlp_bias": True},
]
SCALINGS: list[Any] = [
    *("yarn", 3, [], [YARN], True),
    *({"rope_type": value} for value in ("dynamic", 3, ["yarn"], {}, "linear", "llama3", "longrope")),
    *({"rope_type": "linear", "factor": value} for value in (0, -1, NAN, INFINITE, "2", [2], 10**400)),
    *({**YARN, key: value} for key in ("factor", "beta_fast", "beta_slow") for value in (-1, NAN, "x", 10**400)),
    *({**YARN, "original_max_position_embeddings": value} for value in (-1, "64", 1.5, 1 << 50)),
    *({**YARN, "attention_factor": value} for value in (NAN, "x", -1, [])),
    *({**YARN, "mscale": 1.0, "mscale_all_dim": value} for value in (NAN, "x", -7.213475204444817)),
    {**YARN, "factor": 1e308},
    {**YARN, "truncate": "yes"},
    *({**LLAMA3, key: value} for key in ("low_freq_factor", "high_freq_factor") for value in (0, -1, NAN, "x")),
    {**LLAMA3, "low_freq_factor": 4.0},
    *({**LONGROPE, "long_factor": value} for value in ([], [1.0], 3, "x", [0.0] * 8, [NAN] * 8, ["1"] * 8, [-1] * 8)),
    {**LONGROPE, "original_max_position_embeddings": 1, "factor": 4.0},
]  # fmt: skip
CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"not json",
    "truncated": json.dumps(CONFIG).encode()[:-9],
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "a text": b'"llama"',
    "no UTF-8": b'{"model_type": "\xff"}',
    "UTF-16": json.dumps(CONFIG).encode("utf-16"),
    "100,000 deep": b'{"a":' * 100_000,
    "10^5 digits": b'{"vocab_size": ' + b"9" * 100_000 + b"}",
    "80 MiB": b" " * (80 << 20),
    "zeros": bytes(4096),
}


IN_OTHER_WORDS = {
    "{'num_hidden_layers': 2}": "missing: model.layers.1",
    "{'vocab_size': 97}": "(96, 32), needs (97, 32)",
    "{'num_attention_heads': 3}": "num_query_heads=3",
    "{'num_key_value_heads': 3}": "num_kv_heads=3",
    "{'eos_token_id': -1}": "eos tokens [-1]",
    "{'eos_token_id': 96}": "eos tokens [96]",
    "{'partial_rotary_factor': 1e-09}": "0 rotating dimensions",
}
"""What is wrong only together with other fields, or with the weights."""


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_bad_field_is_named(fields: dict[str, Any], model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, **fields)
    ((name, _),) = fields.items()
    assert_refused(serve(model), str(model), IN_OTHER_WORDS.get(str(fields), name))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_bad_rotation_is_refused(scaling: Any, key: str, model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, **{key: scaling})
    assert_refused(serve(model), CONFIGS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", [CONFIGS, GENERATION, "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_json_object_is_refused(name: str, file: str, model: Path, serve: Serve) -> None:
    (model / file).write_bytes(CONTENTS[name])
    assert_refused(serve(model), file)


@pytest.mark.parametrize("eos", ["2", 2.5, [2, None], [[2]], {"a": 1}, -1, 96, True])
def test_a_bad_generation_config_is_refused(eos: Any, model: Path, serve: Serve) -> None:
    (model / GENERATION).write_text(json.dumps({"eos_token_id": eos}))
    assert_refused(serve(model), GENERATION, "eos_token_id")


@pytest.mark.parametrize("file", [CONFIGS, GENERATION, "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["directory", "dangling", "loop", "pipe", "endless"])
def test_what_is_no_readable_file_is_refused(kind: str, file: str, model: Path, serve: Serve) -> None:
    path = model / file
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"dangling": "nowhere", "loop": file, "endless": "/dev/zero"}[kind])
    assert_refused(serve(model), file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(model: Path, serve: Serve) -> None:
    (model / CONFIGS).chmod(0)
    assert_refused(serve(model), CONFIGS, "Permission denied")


def test_more_memory_than_there_is(model: Path, serve: Serve) -> None:
    edit_json(model / CONFIGS, vocab_size=1 << 24, hidden_size=1 << 16, num_hidden_layers=1000)
    assert_refused(serve(model, "--load-format", "dummy"), "GiB")
    edit_json(model / CONFIGS, num_hidden_layers=1, vocab_size=1 << 24, hidden_size=1 << 17, head_dim=16)
    assert_refused(serve(model, "--load-format", "dummy"), "GiB")
