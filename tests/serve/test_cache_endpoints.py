"""``/cache/save`` and ``/cache/restore`` of a real engine with a tiny model, over HTTP."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cached_server import tokens
from test_serve_errors import error_of

sys.path.append(str(Path(__file__).parents[1] / "prefix_cache"))

from faulty_disks import HeldDisk

Serve = Callable[..., Any]


@pytest.mark.parametrize("kv", ["full", "turbo:values=dense"])
def test_what_was_saved_comes_back_after_a_crash(serve: Serve, tmp_path: Path, kv: str) -> None:
    prompt, options = tokens(1, 700), {"kv": kv, "kv_dense_below": 0}
    with serve(**options) as client:
        saved = client.done("/cache/save", name="a.prompt-1", prompt=prompt)
        shutil.copytree(tmp_path / "cache", tmp_path / "crashed")  # nothing that is written at the end of an engine
        assert {*saved} == {"name", "tokens", "bytes", "seconds"} and saved["name"] == "a.prompt-1"
        assert saved["tokens"] == 640 and saved["seconds"] > 0
        files = sum(path.stat().st_size for path in (tmp_path / "crashed").glob("*.safetensors"))
        assert saved["bytes"] == client.metric("pinned_bytes") == files
        # It is there already: nothing is written once more, and a start of it is one of its files.
        assert client.done("/cache/save", name="again", prompt=prompt)["bytes"] == saved["bytes"]
        half = client.done("/cache/save", name="half", prompt=prompt[:330])
        assert (half["tokens"], half["bytes"]) == (320, saved["bytes"])
        assert client.metric("pinned_bytes") == files
    with serve(**options, kv_disk_dir=str(tmp_path / "crashed")) as client:
        restored = client.done("/cache/restore", name="a.prompt-1")
        assert (restored["tokens"], restored["bytes"]) == (saved["tokens"], saved["bytes"])
        stats = client.engine.engine.stats().prefixes
        assert stats["disk"].restores == 1 and stats["host"].used_bytes > 0
        assert client.done("/cache/restore", name="a.prompt-1")["tokens"] == 640  # it is there
        for path in (tmp_path / "crashed").glob("*.safetensors"):
            path.unlink()  # it is not read once more
        assert client.cached([*prompt, 5]) == 640
        assert client.cached([*prompt[:400], 5]) == 384


def test_a_conversation_is_a_chain_that_is_kept_whole(serve: Serve, tmp_path: Path) -> None:
    prompt = tokens(1, 330)
    with serve() as client:
        first = client.done("/cache/save", name="first", prompt=prompt)
        client.forget_above_the_disk()
        second = client.done("/cache/save", name="second", prompt=prompt + tokens(2, 330))
        assert (first["tokens"], second["tokens"]) == (320, 640) and second["bytes"] > first["bytes"]
        snapshots = json.loads((tmp_path / "cache" / "names" / "second.json").read_text())["snapshots"]
        assert len(snapshots) == 2
        client.forget_above_the_disk()
        assert client.done("/cache/restore", name="second")["bytes"] == second["bytes"]
        assert client.cached(prompt + tokens(2, 330)) == 640


def test_messages_are_saved_as_they_are_asked(serve: Serve) -> None:
    messages = [{"role": "system", "content": "Be brief. " * 30}]
    with serve() as client:
        saved = client.done("/cache/save", name="system", messages=messages, model="tiny")
        client.forget_above_the_disk()
        client.done("/cache/restore", name="system")
        turns = [*messages, {"role": "user", "content": "Hello!"}]
        usage = client.done("/v1/chat/completions", messages=turns, max_tokens=1)["usage"]
        assert 128 < usage["prompt_tokens_details"]["cached_tokens"] <= saved["tokens"]


def test_a_restore_is_for_its_own_salt_alone(serve: Serve) -> None:
    prompt = tokens(1)
    with serve() as client:
        client.done("/cache/save", name="mine", prompt=prompt, cache_salt="mine")
        client.forget_above_the_disk()
        client.done("/cache/restore", name="mine")
        assert client.cached(prompt) == client.cached(prompt, cache_salt="other") == 0
        assert client.cached(prompt, cache_salt="mine") == 256


def test_what_is_saved_outlives_others(serve: Serve, tmp_path: Path) -> None:
    with serve() as client:
        size = client.done("/cache/save", name="probe", prompt=tokens(0))["bytes"]
    shutil.rmtree(tmp_path / "cache")
    with serve(kv_disk_gib=3.5 * size / 2**30) as client:
        client.done("/cache/save", name="mine", prompt=tokens(1))
        for seed in range(2, 8):
            client.cached(tokens(seed))
        client.forget_above_the_disk()
        assert client.metric("evictions_total") >= 3
        assert client.done("/cache/restore", name="mine")["tokens"] == client.cached(tokens(1)) == 256
        assert client.cached(tokens(2)) == 0
        for name, seed in (("second", 8), ("third", 9)):
            client.done("/cache/save", name=name, prompt=tokens(seed))
        error = error_of(client.post("/cache/save", name="fourth", prompt=tokens(10)), 503)
        assert error["code"] == "not_done" and "beside what names keep, on the disk (--kv-disk-gib)" in error["message"]
        assert client.metric("pinned_bytes") == 3 * size
        # The same name with another prompt keeps that instead.
        client.done("/cache/save", name="third", prompt=tokens(1))
        client.forget_above_the_disk()
        assert client.done("/cache/save", name="fourth", prompt=tokens(10))["tokens"] == 256


def test_a_file_that_was_removed_is_written_once_more(serve: Serve, tmp_path: Path) -> None:
    with serve() as client:
        first = client.done("/cache/save", name="x", prompt=tokens(1))
        for file in (tmp_path / "cache").glob("*.safetensors"):
            file.unlink()
        assert client.done("/cache/save", name="x", prompt=tokens(1))["bytes"] == first["bytes"]
        assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1


def test_what_two_servers_have_computed_at_once(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, prompt = HeldDisk("write"), tokens(1, 330)
    with serve() as one, monkeypatch.context() as patch:
        patch.setattr("shadowkv.prefix_cache.disk.tier.FileSystem", lambda: disk)
        with serve() as other:
            other.cached(prompt)
            assert disk.reached.wait(300)
            one.done("/cache/save", name="one", prompt=prompt)
            disk.go_on.set()
            # It has the start on the device, as it has computed it itself; on the disk that is as the first one has.
            assert other.done("/cache/save", name="two", prompt=prompt + tokens(2, 330))["tokens"] == 640
            other.forget_above_the_disk()
            other.done("/cache/restore", name="two")
            assert other.cached(prompt + tokens(2, 330)) == 640


def test_a_branch_that_is_shorter_than_what_it_leaves(serve: Serve) -> None:
    with serve() as client:
        client.cached(tokens(1, 700))
        branch = tokens(1, 330) + tokens(2, 130)
        assert client.done("/cache/save", name="x", prompt=branch)["tokens"] == 448
        client.forget_above_the_disk()
        client.done("/cache/restore", name="x")
        assert client.cached(branch) == 448


@pytest.mark.parametrize("name", ["", "../x", "a/b", "x" * 65, "ä", "a\n", "a\x00", None, 7, ["a"]])
@pytest.mark.parametrize("path", ["/cache/save", "/cache/restore"])
def test_a_bad_name_is_named(call: Any, path: str, name: Any) -> None:
    body = {"name": name} | ({"prompt": "Hi"} if path == "/cache/save" else {})
    error = error_of(call("POST", path, json=body))
    assert error["param"] == "name"
    if isinstance(name, str):
        assert "is no valid name: use 1 to 64 of A-Z" in error["message"]
        assert repr(name) in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        ({"prompt": "a", "parse_special": True}, "parse_special"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "max_tokens": 5}, "max_tokens"),
    ],
)
def test_a_prompt_that_cannot_be_saved_is_refused(call: Any, body: dict[str, Any], param: str) -> None:
    error = error_of(call("POST", "/cache/save", json={"name": "x", **body}))
    assert error["param"] == param


def test_what_cannot_be_said_in_the_schema(serve: Serve) -> None:
    with serve() as client:
        error = error_of(client.post("/cache/save", name="x", prompt=tokens(1, 64)))
        assert error["param"] == "prompt" and "the prompt has 64 tokens, and needs more than 64" in error["message"]
        assert error_of(client.post("/cache/save", name="x", prompt=[299, 300]))["param"] == "prompt"
        error = error_of(client.post("/cache/save", name="x", prompt=tokens(1, 2048)))
        assert error["code"] == "context_length_exceeded"
        error = error_of(client.post("/cache/restore", name="x"), 404)
        assert error["code"] == "unknown_name" and error["message"] == "nothing is saved as 'x'"


def test_without_a_directory_there_is_nothing_to_save_to(serve: Serve) -> None:
    with serve(kv_disk_dir=None) as client:
        for path, body in (("/cache/save", {"prompt": tokens(1)}), ("/cache/restore", {})):
            error = error_of(client.post(path, name="x", **body))
            assert error["message"] == "this server has no disk tier: it was started without --kv-disk-dir"
