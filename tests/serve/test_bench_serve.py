"""The benchmark client: its figures, of a live server and of times made by hand, and what it says of what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from http_server import http_server

from robustness.tiny_model import ENGINE, tiny_model
from shadowkv import __version__
from shadowkv.bench.__main__ import main
from shadowkv.bench.serving_stats import Record, decode_only, figures
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.outputs import TextOutput
from shadowkv.engine.request import Request
from shadowkv.serve.app import build_app
from tests.local_engine import LocalEngine


@pytest.fixture(scope="module")
def tiny() -> Iterator[str]:
    with tiny_model() as folder:
        engine = LocalEngine(EngineConfig(model=str(folder), max_num_seqs=4, max_model_len=512, **ENGINE))
        engine.start()
        with http_server(build_app(engine, "tiny")) as url:
            yield f"{url}/v1"
        engine.shutdown(120)


def run(url: str, *more: str) -> int:
    return main(["serve", "--base-url", url, "--vocab-size", "128", *more])


def test_a_live_server(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    sizes = ["--num-prompts", "7", "--random-input-len", "200", "--random-output-len", "30", "--num-warmups", "1"]
    assert run(tiny, *sizes, "--max-concurrency", "3", "--out", str(out)) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (found["completed"], found["failed"], found["interrupted"]) == (7, 0, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (7 * 200, 7 * 30)
    assert (found["model_id"], found["max_model_len"], found["kv"]) == ("tiny", 512, ENGINE["kv"])
    assert found["version"] == __version__
    assert found["output_throughput"] == pytest.approx(7 * 30 / found["duration"])
    assert 0 < found["decode_only_seconds"] < found["duration"]
    for name in ("ttft", "tpot", "itl"):
        assert 0 <= found[f"median_{name}_ms"] <= found[f"p99_{name}_ms"] and found[f"mean_{name}_ms"] > 0
    assert len(found["requests"]) == 7 and {one["output_len"] for one in found["requests"]} == {30}
    assert all(0 < one["ttft_ms"] < one["e2el_ms"] for one in found["requests"])
    assert "Total generated tokens" in capsys.readouterr().out


def test_requests_come_at_their_rate(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    sizes = ["--num-prompts", "10", "--random-input-len", "4", "--random-output-len", "1"]
    assert run(tiny, *sizes, "--request-rate", "20", "--out", str(out)) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["duration"] > 0.1 and found["mean_tpot_ms"] is None


def test_a_trace_is_replayed_and_judged(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    sizes = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "4", "--request-rate", "40"]
    limits, out = ["--goodput", "ttft:60000", "tpot:60000"], tmp_path / "new" / "result.json"
    url = tiny.removesuffix("/v1")  # as vLLM has it
    assert run(url, *sizes, *limits, "--trace-out", str(trace), "--out", str(out)) == 0
    first = json.loads(out.read_text(encoding="utf-8"))
    assert first["good_share"] == 1 and first["request_goodput"] == first["request_throughput"]
    assert 0 < first["median_e2el_ms"] <= first["p99_e2el_ms"]
    assert "P99 E2EL" in capsys.readouterr().out
    replay = ["--trace-in", str(trace), "--trace-out", str(again), "--out", str(out)]
    assert run(tiny, *replay, "--goodput", "ttft:0.001") == 0
    second = json.loads(out.read_text(encoding="utf-8"))
    assert trace.read_text() == again.read_text() and second["num_prompts"] == 6 and second["good_share"] == 0
    assert "seed" not in second and second["trace"] == str(trace)
    times = [json.loads(line)["timestamp"] for line in trace.read_text().splitlines()]
    assert all(one["sent_s"] >= time - 1e-3 for one, time in zip(second["requests"], times, strict=True))


def test_the_highest_rate_is_searched(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "2", "--request-rate", "300"]
    assert run(tiny, *sizes, "--find-rate") == 2
    assert "--find-rate needs --goodput" in capsys.readouterr().err
    out = tmp_path / "rates.json"
    search = [*sizes, "--find-rate", "--out", str(out), "--goodput"]
    # No server answers in a nanosecond, at whatever rate.
    assert run(tiny, *search, "ttft:0.000001") == 1
    found = json.loads(out.read_text(encoding="utf-8"))
    rates = [one["request_rate"] for one in found["runs"]]
    assert found["highest_rate"] is None and rates == [300, 150, 75, 37.5, 18.75]
    assert all(one["completed"] == 3 for one in found["runs"])
    assert run(tiny, *search, "ttft:1") == 2
    assert "runs with other values of goodput" in capsys.readouterr().err


def test_what_is_wrong_is_said(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--num-prompts", "0") == 2
    assert "--num-prompts 0 must be positive" in capsys.readouterr().err
    assert run("http://127.0.0.1:9/v1") == 2
    assert "no server at http://127.0.0.1:9/v1" in capsys.readouterr().err
    assert run(tiny, "--random-input-len", "500", "--random-output-len", "13") == 2
    assert "513 tokens of prompt and output are more than tiny's maximum, 512" in capsys.readouterr().err
    assert run(f"{tiny}/x") == 2
    assert "answers 404" in capsys.readouterr().err
    assert run(tiny, "--random-input-len", "9", "--num-warmups", "1", "--model", "other") == 2
    assert "'other' does not exist" in capsys.readouterr().err
    assert run(tiny, "--random-input-len", "9", "--num-prompts", "2", "--vocab-size", str(10**9)) == 1
    assert "2 requests failed; the first: status 400: token id" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine, generate = FakeEngine(), FakeEngine.generate
    hanging = 0

    async def hang(
        self: FakeEngine, requests: Sequence[Request], timeout: float | None = None
    ) -> AsyncIterator[tuple[int, TextOutput]]:
        """Two whole answers; the third one stops half-way, and the last does not begin."""
        nonlocal hanging
        hanging += 1
        number = hanging
        if number > 3:
            await asyncio.Event().wait()
        async for index, output in generate(self, requests, timeout):
            yield index, output
            if number == 3 and output.completion_tokens == 5:
                threading.Timer(8, os.kill, (os.getpid(), signal.SIGINT)).start()
                await asyncio.Event().wait()

    monkeypatch.setattr(FakeEngine, "generate", hang)
    with http_server(build_app(engine, "fake")) as url:
        sizes = ["--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "12"]
        assert run(f"{url}/v1", *sizes) == 1
    shown = dict(line.split(":") for line in capsys.readouterr().out.splitlines() if ":" in line)
    counts = [int(shown[f"{kind} requests"]) for kind in ("Successful", "Failed", "Interrupted")]
    assert counts == [2, 0, 2] and int(shown["Total generated tokens"]) == 12 + 12 + 5


def record(sent: float, *chunks: float, tokens: int = 0) -> Record:
    return Record(sent, 100, list(chunks), tokens, done=True)


def test_only_time_in_which_all_decode_is_decode_only() -> None:
    records = [record(0, 1, 2, 3, 4, 5), record(0, 2, 3.5, 6)]
    assert decode_only(records, 2) == [(2, 5)]
    found = figures(records, 2, 0, 6)
    assert found["decode_only_seconds"] == 3 and found["decode_only_throughput"] == pytest.approx(4 / 3)
    # A third that waits for its first token is being prefilled.
    records.append(record(3, 4))
    assert decode_only(records, 2) == [(2, 3), (4, 5)]
    assert figures([record(0, 1, 2), record(0, 3, 4)], 2, 0, 4)["decode_only_throughput"] is None
    # One that was refused waits for nothing.
    assert decode_only([*records, Record(0, 100, error="HTTP 400")], 2) == [(2, 3), (4, 5)]


def test_tokens_are_those_that_the_server_counts() -> None:
    found = figures([record(0, 1, 2, 3, tokens=5)], 1, 0, 4)
    assert found["total_output_tokens"] == 5 and found["output_throughput"] == 5 / 4
    assert found["mean_tpot_ms"] == 500 and found["mean_itl_ms"] == 1000 and found["mean_ttft_ms"] == 1000
    assert found["decode_only_throughput"] == pytest.approx(2 * 5 / 3 / 2)
