"""``shadowkv bench frontend``: the real server between a client and a mock engine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from shadowkv.bench.__main__ import main
from shadowkv.bench.frontend import Stream, Window, add_arguments, server
from shadowkv.bench.mock_clock import ALPHABET, DIGITS, clock_digits, seconds_since
from shadowkv.command_line import Parser
from tests.waiting import wait_until

FEW = ["--streams", "3", "--model", "llama-3.1-8b"]


def test_a_run_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    out = tmp_path / "new" / "frontend.json"
    assert main(["frontend", *FEW, "--rate", "300", "--seconds", "1", "--tokens", "40", "--out", str(out)]) == 0
    run = json.loads(out.read_text())["at_rate"]
    assert run["offered"] == 300 and 0 < run["delivered"] < 600
    assert run["answers"] == 9
    assert run["events"] * run["tokens_per_event"] == pytest.approx(run["delivered"])
    assert 0 < run["median_delay_ms"] <= run["p99_delay_ms"] < 30_000
    assert "Tokens per event" in capsys.readouterr().out
    assert cores is None or os.sched_getaffinity(0) == cores


@pytest.mark.slow
def test_chats_are_measured_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontend", *FEW, "--rate", "300", "--seconds", "1", "--api", "chat"]) == 0
    assert "Delivered" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--streams", "0"], "--streams 0 must be finite and positive"),
        (["--rate", "nan"], "--rate nan must be"),
        (["--model", "no-such-model"], "no known name"),
    ],
)
def test_what_cannot_be_measured_is_said(flags: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontend", *flags]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_the_mock_engine_ends_what_is_broken_off() -> None:
    parser = Parser()
    add_arguments(parser)
    with server(parser.parse_args(FEW)) as (url, http):
        body = {"prompt": "x", "max_tokens": 10_000, "stream": True, "seed": 50, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=120) as response:
            lines = response.iter_lines()  # which ends the answer when it is collected
            assert next(lines).startswith("data: ")
            assert running(url) == 1
        wait_until(lambda: not running(url))
        (engine,) = psutil.Process(http).children()
    assert not engine.is_running()


def running(url: str) -> int:
    text = httpx.get(f"{url}/../metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("shadowkv:num_requests_running{")]
    return int(float(line.split()[-1]))


def test_an_answer_is_a_clock() -> None:
    made = 123456.789
    text = "".join(ALPHABET[digit] for digit in clock_digits(made))
    assert len(text) == DIGITS and seconds_since(text, made + 0.25) == pytest.approx(0.25, abs=1e-4)


def test_delays_are_from_the_first_digit_to_its_event() -> None:
    window = Window(1, psutil.Process())
    stream = Stream(window, first=True, last=True)
    text = "".join(ALPHABET[digit] for digit in [*clock_digits(10.0), *clock_digits(20.0)])
    for part, when in ((text[:1], 10.5), (text[1:6], 20.25), (text[6:], 30.0)):
        stream.take({"choices": [{"text": part, "finish_reason": None}]}, when)
    stream.take({"choices": [{"text": "", "finish_reason": "length"}]}, 31.0)
    assert window.tokens == 8 and window.events == 3 and window.end > window.begin
    assert window.delays == pytest.approx([0.5, 0.25], abs=1e-4)
