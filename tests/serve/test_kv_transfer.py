"""Prompts that a prefill server computes and a decode server of the same directory goes on with."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from cached_server import Client, tokens
from test_serve_errors import error_of

sys.path.append(str(Path(__file__).parents[1] / "prefix_cache"))

from faulty_disks import HeldDisk

from tests.local_engine import LocalEngine

Serve = Callable[..., Any]

PROMPT = tokens(1, 700)
SENT = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "remote_engine_id": None}}


@contextmanager
def both(serve: Serve, **options: Any) -> Iterator[tuple[Client, Client]]:
    """A prefill server and a decode server."""
    with serve(role="prefill", **options) as prefill, serve(role="decode", **options) as decode:
        yield prefill, decode


def ask(client: Client, prompt: list[int], **body: Any) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were cached."""
    answer = client.done("/v1/completions", prompt=prompt, temperature=0, ignore_eos=True, **body)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def prefilled(client: Client, prompt: list[int]) -> dict[str, Any]:
    """What a prefill server says that a decode server is to be told."""
    params = client.done("/v1/completions", prompt=prompt, **SENT)["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    return params


@pytest.mark.parametrize("kv", ["full", "turbo:values=dense"])
def test_a_decode_server_answers_as_a_hit_on_one_server(serve: Serve, tmp_path: Path, kv: str) -> None:
    options = {"kv": kv, "kv_dense_below": 0}
    with serve(**options, kv_disk_dir=str(tmp_path / "alone")) as alone:
        ask(alone, PROMPT, max_tokens=1)
        alone.forget_above_the_disk()
        wanted = ask(alone, PROMPT, max_tokens=24)
    assert wanted[1] == 640  # of 700: the last page is not full
    with both(serve, **options) as (prefill, decode):
        params = prefilled(prefill, PROMPT)
        files = {path.stem for path in (tmp_path / "cache").glob("*.safetensors")}
        assert set(params["remote_snapshots"]) <= files  # when the answer comes
        assert ask(decode, PROMPT, max_tokens=24, kv_transfer_params=params) == wanted
        # The next turn is prefilled behind what the decode server has written, and its files form one chain.
        longer = PROMPT + tokens(2, 200)
        params = prefilled(prefill, longer)
        assert len(params["remote_snapshots"]) == 2
        wanted_tokens = 896 if kv == "full" else 832  # all full pages, and those that are compressed
        assert ask(decode, longer, max_tokens=4, kv_transfer_params=params)[1] == wanted_tokens


def test_all_answers_of_a_prefill_server_wait_for_the_disk(serve: Serve, tmp_path: Path) -> None:
    with serve(role="prefill") as prefill:
        for count, stream in enumerate((False, True), 1):
            answer = prefill.post("/v1/completions", prompt=tokens(count), max_tokens=1, stream=stream)
            assert "remote_snapshots" not in answer.text  # nobody has asked
            assert len([*(tmp_path / "cache").glob("*.safetensors")]) == count


def test_snapshots_that_are_late_are_waited_for_and_others_computed(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(role="prefill", kv_disk_dir=str(tmp_path / "away")) as prefill:
        params = prefilled(prefill, PROMPT)
        (name,) = params["remote_snapshots"]
    with serve(role="decode") as decode:
        file = f"{name}.safetensors"
        (tmp_path / "cache" / "half").write_bytes((tmp_path / "away" / file).read_bytes())
        began = time.monotonic()
        threading.Timer(0.5, lambda: (tmp_path / "cache" / "half").rename(tmp_path / "cache" / file)).start()
        text, cached = ask(decode, PROMPT, max_tokens=8, kv_transfer_params=params)
        assert cached == 640 and time.monotonic() - began > 0.5

        monkeypatch.setattr("shadowkv.prefix_cache.saves.FETCH_SECONDS", 0.3)
        params["remote_snapshots"] = [40 * "a"]
        began = time.monotonic()
        assert ask(decode, tokens(3), max_tokens=8, kv_transfer_params=params)[1] == 0
        assert 0.3 < time.monotonic() - began < 60
        assert not decode.engine.engine.scheduler.prefix_cache.lower.saves.busy
        decode.forget_above_the_disk()
        data = bytearray((tmp_path / "cache" / file).read_bytes())
        data[len(data) // 2] ^= 4
        (tmp_path / "cache" / file).write_bytes(data)
        params["remote_snapshots"] = [name]
        assert ask(decode, PROMPT, max_tokens=8, kv_transfer_params=params) == (text, 0)


def test_what_another_policy_has_written_is_not_waited_for(serve: Serve) -> None:
    with serve(role="prefill", kv="quest", kv_dense_below=0) as prefill, serve(role="decode") as decode:
        params = prefilled(prefill, PROMPT)
        began = time.monotonic()
        assert ask(decode, PROMPT, max_tokens=1, kv_transfer_params=params)[1] == 0
        assert time.monotonic() - began < 60  # of 120


def test_a_prompt_that_does_not_get_to_the_disk_is_answered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk()
    monkeypatch.setattr("shadowkv.prefix_cache.disk.tier.FileSystem", lambda: disk)
    monkeypatch.setattr("shadowkv.engine.process.client.SENDING_SECONDS", 0.3)
    with serve(role="prefill") as prefill:
        disk.held = ("write",)
        assert prefill.done("/v1/completions", prompt=PROMPT, **SENT)["kv_transfer_params"] is None
        disk.go_on.set()
        short, scored = {"prompt": tokens(1, 64)}, {"prompt": tokens(2), "cache_prompt": False}
        for body in (short, scored):  # there is nothing to hand over
            assert prefill.done("/v1/completions", **body, **SENT)["kv_transfer_params"] is None


def test_each_role_does_its_own_part_alone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask_engine = LocalEngine._ask

    async def spy(self: LocalEngine, *arguments: Any) -> Any:
        asked.append(self.role)
        return await ask_engine(self, *arguments)

    monkeypatch.setattr(LocalEngine, "_ask", spy)
    named = {"do_remote_prefill": True, "remote_snapshots": [40 * "a"]}
    with both(serve) as (prefill, decode):
        ask(prefill, tokens(1, 64), max_tokens=1, kv_transfer_params=named)
        answer = decode.done("/v1/completions", prompt=tokens(1), **SENT)
        assert answer["kv_transfer_params"] is None and not asked
    with serve(kv_disk_dir=None) as one:
        assert ask(one, PROMPT, max_tokens=1, kv_transfer_params=named)[1] == 0
        assert one.done("/v1/completions", prompt=PROMPT, **SENT)["kv_transfer_params"] is None and not asked
        for wrong in ("../x", 40 * "G", 40 * "a" + "\n"):
            params = {"do_remote_prefill": True, "remote_snapshots": [wrong]}
            answer = one.post("/v1/completions", prompt="a", kv_transfer_params=params)
            assert error_of(answer, 400)["param"].startswith("kv_transfer_params")
    with serve() as one:
        params = prefilled(one, PROMPT)
        assert ask(one, PROMPT, max_tokens=1, kv_transfer_params=params)[1] >= 640 and asked == ["both", "both"]


def test_a_prefill_server_that_is_killed_costs_no_answer(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    flags = f"--model {tiny_model} --load-format dummy --device cpu --kv full --port 0".split()
    command = [sys.executable, "-m", "shadowkv.serve", *flags, "--role", "prefill"]
    command += ["--kv-disk-dir", str(tmp_path / "cache"), "--kv-offload-gib", "0.03125"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("ready: "))
        with serve(role="decode") as decode, httpx.Client(base_url=url, timeout=300) as http:
            done = http.post("/completions", json={"prompt": PROMPT, **SENT}).json()
            params = done["kv_transfer_params"]
            asking = threading.Thread(target=lambda: _lost(http))
            asking.start()
            process.kill()
            asking.join()
            assert ask(decode, PROMPT, max_tokens=4, kv_transfer_params=params)[1] == 640
            # What it did meanwhile is on the disk as a whole or not at all.
            assert ask(decode, tokens(4), max_tokens=4)[1] in (0, 256)


def _lost(http: httpx.Client) -> None:
    with suppress(httpx.HTTPError):
        http.post("/completions", json={"prompt": tokens(4), **SENT})
