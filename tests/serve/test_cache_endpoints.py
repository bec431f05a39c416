"""``/cache/save`` and ``/cache/restore`` of a real engine with a tiny model, over HTTP."""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import http_server
from test_serve_errors import error_of

sys.path.append(str(Path(__file__).parents[1] / "cache"))

from faulty_disks import HeldDisk

from shadowkv.engine.async_engine import AsyncEngine
from shadowkv.engine.config import EngineConfig
from shadowkv.serve.api import build_app
from shadowkv.serve.settings import ServerSettings

MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}
OFFLOAD = 0.03125


def tokens(seed: int, length: int = 300) -> list[int]:
    return random.Random(seed).choices(range(2, 256), k=length)


class Client:
    """Asks one server."""

    def __init__(self, url: str, engine: AsyncEngine) -> None:
        self.engine, self.http = engine, httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def done(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def cached(self, prompt: list[int] | str, **body: Any) -> int:
        """Cached tokens of a prompt."""
        answer = self.done("/v1/completions", prompt=prompt, max_tokens=1, **body)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        (line,) = [one for one in lines if one.startswith(f"shadowkv:prefix_cache_{name}{{") and 'tier="disk"' in one]
        return float(line.split()[-1])

    def forget_above_the_disk(self) -> None:
        """Evicts all that is kept on the device and in host memory."""
        done = threading.Event()

        def forget() -> None:
            cache = self.engine.engine.scheduler.prefix_cache
            while cache.busy:
                cache.advance(idle=True)
            while cache.evict():
                pass
            for node in [node for node in cache.lower.copies.nodes if node.copy.slabs is not None]:
                cache.lower.copies.leave_host(node)
            done.set()

        self.engine._commands.put(forget)
        assert done.wait(20)


Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Serve:
    """Serves the tiny model, with files in ``cache`` unless told otherwise."""

    @contextmanager
    def server(settings: ServerSettings | None = None, **options: Any) -> Iterator[Client]:
        given = {"kv": "full", "kv_offload_gib": OFFLOAD, "kv_disk_dir": str(tmp_path / "cache"), "max_num_seqs": 4}
        config = EngineConfig(model=str(model), load_format="dummy", device="cpu", **{**given, **options})
        engine = AsyncEngine(config)
        engine.start()
        try:
            with http_server(build_app(engine, "tiny", settings)) as url:
                client = Client(url, engine)
                with client.http:
                    yield client
        finally:
            engine.shutdown(20)

    return server


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
        stats = client.engine.stats().prefixes
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
        patch.setattr("shadowkv.cache.disk.FileSystem", lambda: disk)
        with serve() as other:
            other.cached(prompt)
            assert disk.reached.wait(20)
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
        assert "is no name to save as: that is 1 to 64 of A-Z" in error["message"]
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
        assert error["param"] == "prompt" and "the prompt has 64 tokens; pages of 64 are saved" in error["message"]
        assert error_of(client.post("/cache/save", name="x", prompt=[299, 300]))["param"] == "prompt"
        error = error_of(client.post("/cache/save", name="x", prompt=tokens(1, 2048)))
        assert error["code"] == "context_length_exceeded"
        error = error_of(client.post("/cache/restore", name="x"), 404)
        assert error["code"] == "unknown_name" and error["message"] == "nothing is saved as 'x'"


def test_without_a_directory_there_is_nothing_to_save_to(serve: Serve) -> None:
    with serve(kv_disk_dir=None) as client:
        for path, body in (("/cache/save", {"prompt": tokens(1)}), ("/cache/restore", {})):
            error = error_of(client.post(path, name="x", **body))
            assert error["message"] == "this server keeps nothing on a disk: it was started without --kv-disk-dir"


def test_another_policy_and_a_file_that_was_changed(serve: Serve, tmp_path: Path) -> None:
    with serve() as client:
        client.done("/cache/save", name="x", prompt=tokens(1))
    with serve(kv="quest", kv_dense_below=0) as client:
        error = error_of(client.post("/cache/restore", name="x"), 409)
        assert error["code"] == "unusable_name" and "'x' is of another model or policy (key " in error["message"]
        file = tmp_path / "cache" / "names" / "x.json"
        file.write_text(file.read_text()[:-9])
        error = error_of(client.post("/cache/restore", name="x"), 409)
        assert "names/x.json is not what was written: " in error["message"]
        assert client.done("/cache/save", name="x", prompt=tokens(1))["tokens"] == 256
        client.forget_above_the_disk()
        assert client.done("/cache/restore", name="x")["tokens"] == client.cached(tokens(1)) == 256


def test_a_snapshot_that_was_changed_is_not_restored(serve: Serve, tmp_path: Path) -> None:
    with serve() as client:
        client.done("/cache/save", name="x", prompt=tokens(1))
        client.forget_above_the_disk()
        (file,) = (tmp_path / "cache").glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
        assert error_of(client.post("/cache/restore", name="x"), 503)["code"] == "not_done"
        error = error_of(client.post("/cache/restore", name="x"), 404)
        assert error["message"] == "what was saved as 'x' is not all there any more; save it anew"
        assert client.cached(tokens(1)) == 0


def test_more_than_host_memory_has_room_for(serve: Serve) -> None:
    with serve() as client:
        client.done("/cache/save", name="x", prompt=tokens(1))
        client.forget_above_the_disk()
        host = client.engine.engine.scheduler.prefix_cache.lower.copies.host
        host.take(host.total_bytes)
        error = error_of(client.post("/cache/restore", name="x"), 503)
        assert "no room for it in host memory (--kv-offload-gib)" in error["message"]
        error = error_of(client.post("/cache/save", name="y", prompt=tokens(2)), 503)
        assert "host memory (--kv-offload-gib)" in error["message"]


@pytest.mark.parametrize("held", ["write", "open"])
def test_a_disk_that_hangs_is_not_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    disk = HeldDisk()
    monkeypatch.setattr("shadowkv.cache.disk.FileSystem", lambda: disk)
    monkeypatch.setattr("shadowkv.engine.async_engine.DISK_SECONDS", 0.6)
    with serve() as client:
        client.done("/cache/save", name="x", prompt=tokens(1))
        client.forget_above_the_disk()
        disk.held = (held,)
        path, body = ("/cache/save", {"prompt": tokens(2)}) if held == "write" else ("/cache/restore", {})
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.post(path, name="x", **body)))
        asking.start()
        assert disk.reached.wait(20)
        assert client.http.get("/health").json() == {"status": "ok"}
        assert client.cached(tokens(3, 60)) == 0  # others are served
        asking.join()
        error = error_of(answers[0], 504)
        assert error["code"] == "timeout" and "within 0.6 s" in error["message"]
        saves = client.engine.engine.saves
        deadline = time.monotonic() + 20
        while saves.busy:  # nothing is left of it
            assert time.monotonic() < deadline
        disk.go_on.set()
        disk.held = ()
        assert client.done("/cache/save", name="x", prompt=tokens(2))["tokens"] == 256


def test_a_request_has_a_limit_of_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk()
    monkeypatch.setattr("shadowkv.cache.disk.FileSystem", lambda: disk)
    with serve(ServerSettings(request_timeout=0.5)) as client:
        disk.held = ("open",)
        error = error_of(client.post("/cache/restore", name="x"), 504)
        assert error["message"] == "the request took longer than this server allows"
        disk.go_on.set()


def test_the_engine_ends_meanwhile(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk()
    monkeypatch.setattr("shadowkv.cache.disk.FileSystem", lambda: disk)
    with serve() as client:
        disk.held = ("open",)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/cache/restore", name="x")))
        asking.start()
        assert disk.reached.wait(20)
        threading.Timer(0.3, disk.go_on.set).start()
        client.engine.shutdown(20)
        asking.join()
        assert answers[0].status_code in (404, 503)
        assert error_of(client.post("/cache/restore", name="x"), 503)["code"] == "engine_dead"
        assert error_of(client.post("/cache/save", name="x", prompt=tokens(1)), 503)["code"] == "engine_dead"


def test_tiers_that_have_failed_keep_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as client:
        saves = client.engine.engine.saves

        def fail(saving: Any) -> None:
            raise OSError("boom")

        monkeypatch.setattr(saves, "_save", fail)
        for _ in range(2):
            error = error_of(client.post("/cache/save", name="x", prompt=tokens(1)), 503)
            assert error["message"] == "the tiers below the device have failed; the server's log says why"
        assert client.cached(tokens(2)) == 0


def test_it_is_behind_the_key(serve: Serve) -> None:
    with serve(ServerSettings(api_key="secret")) as client:
        for path in ("/cache/save", "/cache/restore"):
            assert error_of(client.post(path, name="x", prompt="a"), 401)["code"] == "invalid_api_key"
        client.http.headers["Authorization"] = "Bearer secret"
        assert error_of(client.post("/cache/restore", name="x"), 404)["code"] == "unknown_name"


def test_nobody_waits_for_an_answer_any_more(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk()
    monkeypatch.setattr("shadowkv.cache.disk.FileSystem", lambda: disk)
    with serve() as client:
        disk.held = ("open",)
        with pytest.raises(httpx.ReadTimeout):
            client.http.post("/cache/restore", json={"name": "x"}, timeout=0.3)
        deadline = time.monotonic() + 20
        while client.engine._answers or client.engine.engine.saves.busy:
            assert time.monotonic() < deadline
        disk.go_on.set()
