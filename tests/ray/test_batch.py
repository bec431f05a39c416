"""Batch files on a Ray cluster of this machine: two replicas, one of which is killed at work."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shadowkv.ray.__main__ import main
from tests.tiny_llama import write_config

LINES = 40


def line(number: int) -> str:
    body = {"prompt": [2 + number] * 20, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_bytes().splitlines()]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}.items():
        monkeypatch.setenv(name, value)
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    write_config(tmp_path, 48, 2048, tie_word_embeddings=False)
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    model = ["--model", str(tmp_path), "--load-format", "dummy", "--kv", "full", "--max-num-seqs", "2"]
    return ["batch", *files, *model, "--device", "cpu", "--gpu-memory-utilization", "0.05"]


def replicas() -> list[psutil.Process]:
    """Those of this process's cluster, at work."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if "MapWorker" in "".join(one.cmdline()) + one.name()]


@pytest.mark.slow
def test_every_line_has_one_answer_though_a_replica_is_killed(cluster: None, flags: list[str], tmp_path: Path) -> None:
    bad = ["{not json", line(0), ""]
    (tmp_path / "in.jsonl").write_text("\n".join([*map(line, range(LINES)), *bad]))
    partial, killed, ended = tmp_path / "out.jsonl.partial", list[int](), threading.Event()

    def kill() -> None:
        while not killed and not ended.wait(0.01):
            if partial.exists() and len(partial.read_bytes().splitlines()) >= 4:
                for one in replicas()[:1]:
                    one.kill()
                    killed.append(one.pid)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        assert main([*flags, "--replicas", "2", "--served-model-name", "small", "other"]) == 0
    finally:
        ended.set()
        killing.join()
    found = records(tmp_path / "out.jsonl")
    assert killed and not partial.exists()
    answered = [record["custom_id"] for record in found if record["error"] is None]
    assert sorted(answered, key=int) == [str(number) for number in range(LINES)]
    responses = [record["response"] for record in found if record["error"] is None]
    assert {(response["status_code"], response["body"]["model"]) for response in responses} == {(200, "small")}
    assert sorted(record["error"]["code"] for record in found if record["error"]) == [
        "duplicate_custom_id",
        "invalid_json",
    ]
    # What has been answered is taken over: nothing is left for a replica to do.
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("[1]\n")
    assert main(flags) == 2
    assert main([*flags, "--resume"]) == 0
    assert len(records(tmp_path / "out.jsonl")) == len(found) + 1


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        (["--replicas", "0"], "--replicas 0 must be at least 1"),
        (["--device", "cuda:1"], "--device cuda:1: Ray assigns GPUs to replicas"),
        (["--role", "decode"], "--role decode needs --kv-disk-dir"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_started(
    flags: list[str], more: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, *more]) == 2
    assert wrong in capsys.readouterr().err
    assert "RAY_ADDRESS" not in os.environ
