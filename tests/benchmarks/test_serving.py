"""The table of serving on a CPU with a tiny model: a server that is started, the engine alone, guidellm's reports."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.serving.__main__ import main
from benchmarks.serving.cases import CASES, Shape, arrivals_of, warm_up_of
from benchmarks.serving.client_rate import main as client_rate
from benchmarks.serving.guidellm import figures_of
from benchmarks.serving.rows import COLUMNS
from benchmarks.sweeps.rows import read
from robustness.tiny_model import ENGINE, tiny_model
from shadowkv.bench.server_process import running

SIZES = ["prompt=24", "answer=6", "requests=8", "rate=20", "at_once=6", "long_prompt=200", "long_requests=2"]
SIZES += ["long_rate=8", "mixed_rate=12", "mixed_seconds=1", "mixed_prompt=300", "mixed_every=0.5"]
with socket.create_server(("127.0.0.1", 0)) as free:
    PORT = free.getsockname()[1]
FLAGS = {**ENGINE, "max_model_len": 512, "max_num_seqs": 8}


def table(engine: str, out: Path, model: Path, *more: str) -> int:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
    sizes = ["--set", *SIZES, "--vocab-size", "128", "--port", str(PORT)]
    return main(
        ["--engine", engine, "--out", str(out), *sizes, *more, "--", f"--model={model}", *flags, "--skip-warmup"]
    )


@pytest.mark.slow
def test_the_same_requests_with_a_server_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_model() as model:
        assert table("shadowkv", tmp_path, model, "--label", "shadowkv tiny") == 0
        assert table("shadowkv-direct", tmp_path, model) == 0
        rows = read(tmp_path / "summary.csv")
        assert list(rows[0]) == list(COLUMNS)
        names = ["poisson", "limits", "at-once", "long", "mixed-short", "mixed-long"]
        served, direct = (
            [("shadowkv tiny", one) for one in names],
            [("shadowkv-direct", n) for n in ("poisson", "at-once")],
        )
        assert [(row["engine"], row["case"]) for row in rows] == served + direct
        assert [row["rate"] for row in rows] == ["20", "20", "", "8", "12", "2", "20", ""]
        for row in rows:
            assert 0 < float(row["ttft_mean_ms"]) <= float(row["ttft_p99_ms"])
            assert float(row["tpot_mean_ms"]) > 0 or row["case"] == "at-once", "whose few tokens may be read together"
        details = json.loads((tmp_path / "shadowkv-tiny-poisson.json").read_text(encoding="utf-8"))
        assert f"-m shadowkv.serve --port {PORT} --model={model}" in details["server_command"]
        assert details["server"]["kv"].startswith("shadowkv:") and details["client_versions"]["torch"]
        assert {(one["input_len"], one["output_len"]) for one in details["requests"]} == {(24, 6)}
        alone = json.loads((tmp_path / "shadowkv-direct-poisson.json").read_text(encoding="utf-8"))
        assert alone["server_command"] is None and alone["total_output_tokens"] == 8 * 6
        assert [one["sent_s"] for one in alone["requests"]] == pytest.approx(
            [one["sent_s"] for one in details["requests"]], abs=0.1
        )
        mixed = json.loads((tmp_path / "shadowkv-tiny-mixed-long.json").read_text(encoding="utf-8"))
        assert [one["input_len"] for one in mixed["requests"]] == [300, 300]
        # Nothing is measured again.
        before = (tmp_path / "summary.csv").read_bytes()
        assert table("shadowkv", tmp_path, model, "--label", "shadowkv tiny") == 0
        assert (tmp_path / "summary.csv").read_bytes() == before
        capsys.readouterr()
        assert table("shadowkv", tmp_path / "other", model, "--set", "prompt=600") == 1
        assert "requests failed; the first: status 400" in capsys.readouterr().err


def test_every_engine_gets_the_same_requests_and_no_two_share_a_prompt() -> None:
    shape = Shape(requests=40, at_once=20, long_requests=4)
    seeds: list[int] = []
    for case in CASES:
        arrivals = arrivals_of(case, shape)
        assert arrivals == arrivals_of(case, shape)
        assert [one.timestamp for one in arrivals] == sorted(one.timestamp for one in arrivals)
        seeds += [one.seed for one in arrivals]
    assert len(set(seeds)) == len(seeds)
    assert not {one.seed for case in CASES for one in warm_up_of(case, shape)} & set(seeds)
    mixed = [one for one in arrivals_of("mixed", Shape()) if one.input_length == 122000]
    assert [one.timestamp for one in mixed] == [10, 30, 50] and len(arrivals_of("mixed", Shape())) == 483


def test_a_server_that_does_not_start_is_said(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/v1"
    with (
        pytest.raises(RuntimeError, match=r"ended with 3; the end of .*\n.*\nno memory"),
        running([sys.executable, "-c", "print('no memory'); exit(3)"], url, tmp_path / "log", {}),
    ):
        raise AssertionError
    with (
        pytest.raises(RuntimeError, match=r"did not answer within 0\.3 s"),
        running([sys.executable, "-c", "import time; time.sleep(60)"], url, tmp_path / "log", {}, timeout=0.3),
    ):
        raise AssertionError


def test_a_server_that_is_there_already_is_not_measured(tmp_path: Path) -> None:
    model = (
        "class H(http.server.BaseHTTPRequestHandler):\n def do_GET(self): self.send_response(200); self.end_headers()"
    )
    script = f"import http.server\n{model}\nhttp.server.HTTPServer(('127.0.0.1', {PORT}), H).serve_forever()"
    url = f"http://127.0.0.1:{PORT}/v1"
    with (
        running([sys.executable, "-c", script], url, tmp_path / "log", {}),
        pytest.raises(RuntimeError, match="another server answers"),
        running(["x"], url, tmp_path / "other", {}),
    ):
        raise AssertionError
    with pytest.raises(httpx.HTTPError):
        httpx.get(url)


def report(*times: tuple[float, float]) -> dict[str, object]:
    requests = [
        {
            "time_to_first_token_ms": ttft,
            "inter_token_latency_ms": tpot,
            "request_start_time": 100.0 + number,
            "request_end_time": 101.0 + number,
            "output_tokens": 10,
        }
        for number, (ttft, tpot) in enumerate(times)
    ]
    totals = {"successful": len(times), "errored": 0, "incomplete": 0, "total": len(times)}
    return {"metrics": {"request_totals": totals}, "requests": {"successful": requests}}


def test_figures_of_guidellm_are_of_single_requests() -> None:
    found = figures_of(report((100, 10), (300, 10), (100, 30), (200, 20)))
    assert found["completed"] == 4 and found["duration"] == 4 and found["output_throughput"] == 10
    assert found["good_share"] == 0.5 and found["request_goodput"] == 0.5
    assert found["mean_ttft_ms"] == 175 and found["mean_tpot_ms"] == 17.5 and found["p99_itl_ms"] is None


def test_guidellm_replays_the_trace(tmp_path: Path) -> None:
    """The program's place is taken by one that writes down how it was called, and a report."""
    program, called = tmp_path / "guidellm", tmp_path / "called.json"
    answer = json.dumps({"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [report((100, 10))]})
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(called)!r}, 'w'))\n"
        f"out = sys.argv[sys.argv.index('--output') + 1].removeprefix('kind=json,path=')\n"
        f"open(out, 'w').write({answer!r})\n"
    )
    os.chmod(program, stat.S_IRWXU)
    witness = ["--guidellm", str(program), "--tokenizer", str(tmp_path)]
    with tiny_model() as model:
        assert table("shadowkv", tmp_path / "out", model, *witness) == 0
    (row,) = read(tmp_path / "out" / "summary.csv")
    assert (row["engine"], row["case"], row["ttft_mean_ms"]) == ("shadowkv by guidellm", "poisson", "100")
    assert row["itl_p99_ms"] == ""
    arguments = json.loads(called.read_text())
    assert f"kind=openai_http,target=http://127.0.0.1:{PORT},request_format=/v1/completions" in arguments
    data = json.loads(arguments[arguments.index("--data") + 1])
    trace = Path(data["source"]["path"])
    assert len(trace.read_text().splitlines()) == 8


def test_the_client_takes_what_a_made_up_server_sends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["client_rate", "--streams", "3", "--events", "20", "--steps", "1000"])
    assert client_rate() == 0
    assert "60 events" in capsys.readouterr().out
