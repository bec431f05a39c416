"""What goes wrong with ``/cache/save`` and ``/cache/restore``: files, disks, memory and clients that fail."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cached_server import tokens
from test_serve_errors import error_of

sys.path.append(str(Path(__file__).parents[1] / "prefix_cache"))

from faulty_disks import BrokenDisk, HeldDisk

from shadowkv.prefix_cache.__main__ import main
from shadowkv.prefix_cache.disk.filesystem import FileSystem
from shadowkv.serve.http.settings import ServerSettings
from tests.waiting import wait_until

Serve = Callable[..., Any]


def test_another_policy_and_a_file_that_was_changed(serve: Serve, tmp_path: Path) -> None:
    with serve() as client:
        client.done("/cache/save", name="x", prompt=tokens(1))
    with serve(kv="quest", kv_dense_below=0) as client:
        error = error_of(client.post("/cache/restore", name="x"), 409)
        assert (
            error["code"] == "unusable_name"
            and "'x' is of another model, policy or number of GPUs (key " in error["message"]
        )
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
        assert error["message"] == "snapshots of the saved name 'x' are missing; save it again"
        assert client.cached(tokens(1)) == 0


def test_a_disk_that_cannot_be_written_to_is_said_at_once(serve: Serve, tmp_path: Path) -> None:
    with serve() as client:
        client.done("/cache/save", name="x", prompt=tokens(1))
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("in its place")
        for seed in (2, 3):
            began = time.monotonic()
            error = error_of(client.post("/cache/save", name="y", prompt=tokens(seed)), 503)
            assert error["code"] == "not_done" and "disk: Not a directory; it is tried again in" in error["message"]
            assert str(tmp_path) not in error["message"]
            assert time.monotonic() - began < 20  # it is tried again after 30 s


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
    monkeypatch.setattr("shadowkv.prefix_cache.disk.tier.FileSystem", lambda: disk)
    with serve() as client, monkeypatch.context() as patch:
        client.done("/cache/save", name="x", prompt=tokens(1))
        client.forget_above_the_disk()
        disk.held = (held,)
        patch.setattr("shadowkv.engine.process.client.DISK_SECONDS", 0.6)
        path, body = ("/cache/save", {"prompt": tokens(2)}) if held == "write" else ("/cache/restore", {})
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.post(path, name="x", **body)))
        asking.start()
        assert disk.reached.wait(300)
        assert client.http.get("/health").json() == {"status": "ok"}
        assert client.cached(tokens(3, 60)) == 0  # others are served
        asking.join()
        error = error_of(answers[0], 504)
        assert error["code"] == "timeout" and "within 0.6 s" in error["message"]
        saves = client.engine.engine.saves
        wait_until(lambda: not saves.busy)  # nothing is left of it
        disk.go_on.set()
        disk.held = ()
        patch.undo()
        assert client.done("/cache/save", name="x", prompt=tokens(2))["tokens"] == 256


def test_a_request_has_a_limit_of_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk()
    monkeypatch.setattr("shadowkv.prefix_cache.disk.tier.FileSystem", lambda: disk)
    with serve(ServerSettings(request_timeout=0.5)) as client:
        disk.held = ("open",)
        error = error_of(client.post("/cache/restore", name="x"), 504)
        assert error["message"] == "the request took longer than this server allows"
        disk.go_on.set()


def test_the_engine_ends_meanwhile(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk()
    monkeypatch.setattr("shadowkv.prefix_cache.disk.tier.FileSystem", lambda: disk)
    with serve() as client:
        disk.held = ("open",)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/cache/restore", name="x")))
        asking.start()
        assert disk.reached.wait(300)
        threading.Timer(0.3, disk.go_on.set).start()
        client.engine.shutdown(120)
        asking.join()
        assert answers[0].status_code in (404, 503)
        assert error_of(client.post("/cache/restore", name="x"), 503)["code"] == "server_stopping"
        assert error_of(client.post("/cache/save", name="x", prompt=tokens(1)), 503)["code"] == "server_stopping"


def test_tiers_that_have_failed_keep_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as client:
        saves = client.engine.engine.saves

        def fail(*request: Any) -> Iterator[None]:
            yield
            raise OSError("boom")

        monkeypatch.setattr(saves, "_save", fail)
        for _ in range(2):
            error = error_of(client.post("/cache/save", name="x", prompt=tokens(1)), 503)
            assert error["message"] == "the tiers below the device have failed; the server's log says why"
        assert client.cached(tokens(2)) == 0


def test_it_is_behind_the_key(serve: Serve) -> None:
    with serve(ServerSettings(api_key=("secret",))) as client:
        for path in ("/cache/save", "/cache/restore"):
            assert error_of(client.post(path, name="x", prompt="a"), 401)["code"] == "invalid_api_key"
        client.http.headers["Authorization"] = "Bearer secret"
        assert error_of(client.post("/cache/restore", name="x"), 404)["code"] == "unknown_name"


def test_nobody_waits_for_an_answer_any_more(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk()
    monkeypatch.setattr("shadowkv.prefix_cache.disk.tier.FileSystem", lambda: disk)
    with serve() as client:
        disk.held = ("open",)
        with pytest.raises(httpx.ReadTimeout):
            client.http.post("/cache/restore", json={"name": "x"}, timeout=httpx.Timeout(300, read=0.3))
        wait_until(lambda: not client.engine._answers and not client.engine.engine.saves.busy)
        disk.go_on.set()


def test_a_disk_that_could_not_be_read_for_a_while(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FileSystem()
    monkeypatch.setattr("shadowkv.prefix_cache.disk.tier.FileSystem", lambda: disk)
    with serve() as client:
        client.done("/cache/save", name="x", prompt=tokens(1))
        client.forget_above_the_disk()
        with monkeypatch.context() as patch:
            patch.setattr(disk, "read", BrokenDisk().read)
            assert error_of(client.post("/cache/restore", name="x"), 503)["code"] == "not_done"
        assert client.done("/cache/restore", name="x")["tokens"] == client.cached(tokens(1)) == 256


def test_what_another_server_has_written_anew_is_restored(serve: Serve, tmp_path: Path) -> None:
    with serve() as one, serve() as other:
        one.done("/cache/save", name="x", prompt=tokens(1))
        other.done("/cache/restore", name="x")
        for client in (one, other):
            client.forget_above_the_disk()
        assert main(["prune", "--dir", str(tmp_path / "cache"), "--all"]) == 0
        one.done("/cache/save", name="x", prompt=tokens(1))
        assert other.done("/cache/restore", name="x")["tokens"] == other.cached(tokens(1)) == 256
