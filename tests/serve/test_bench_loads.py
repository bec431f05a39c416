"""What the benchmark sends and how it judges: arrivals, traces, goodput, and the search of the highest rate."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest

from shadowkv.bench.arrivals import Arrival, draw_arrivals, read_trace, write_trace
from shadowkv.bench.find_rate import find_rate, highest_rate, next_rate
from shadowkv.bench.serve import parse_goodput
from shadowkv.bench.serving_stats import METRICS, Record, details, figures, goodput


def test_arrivals_are_of_the_rate_and_as_bursty_as_asked() -> None:
    arrivals = draw_arrivals(4000, 8, 100, 20, seed=1)
    times = [arrival.timestamp for arrival in arrivals]
    assert times == sorted(times) and times[-1] == pytest.approx(500)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)  # as of a Poisson process
    for burstiness, spread in ((0.25, 2), (4, 0.5), (math.inf, 0)):
        gaps = np.diff([one.timestamp for one in draw_arrivals(4000, 8, 100, 20, 1, burstiness)])
        assert gaps.std() / gaps.mean() == pytest.approx(spread, abs=0.2)
    assert {one.timestamp for one in draw_arrivals(9, math.inf, 100, 20, 1)} == {0.0}
    assert draw_arrivals(9, 2, 5, 5, 3) == draw_arrivals(9, 2, 5, 5, 3) != draw_arrivals(9, 2, 5, 5, 4)


def test_a_trace_brings_the_same_requests_again(tmp_path: Path) -> None:
    arrivals = draw_arrivals(5, 3, 40, 6, seed=9)
    write_trace(tmp_path / "trace.jsonl", arrivals)
    again = read_trace(tmp_path / "trace.jsonl")
    assert again == arrivals
    prompts = [arrival.prompt(50) for arrival in again]
    assert prompts == [arrival.prompt(50) for arrival in arrivals]
    assert all(len(prompt) == 40 and max(prompt) < 50 for prompt in prompts) and len(set(map(tuple, prompts))) == 5
    others = tmp_path / "others.jsonl"
    others.write_text(
        '{"timestamp": 2, "input_length": 3, "output_length": 4}\n'
        '{"timestamp": 1, "input_length": 5, "output_length": 6, "hash_ids": [1]}\n'
    )
    assert read_trace(others) == [Arrival(1, 5, 6, 2), Arrival(2, 3, 4, 1)]
    for text in ("", "[]\n", "x\n", '{"timestamp": 1}\n', '{"timestamp": 1, "input_length": 0, "output_length": 4}\n'):
        others.write_text(text)
        with pytest.raises(ValueError, match=r"others\.jsonl"):
            read_trace(others)
    others.write_bytes(b"\xff\n")
    for file, reason in ((others, "it is not UTF-8"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(ValueError, match=f"the trace {file} cannot be read: {reason}; a trace has one JSON object"):
            read_trace(file)


def record(sent: float, *chunks: float, tokens: int, done: bool = True) -> Record:
    return Record(sent, 10, list(chunks), tokens, done)


def test_goodput_is_of_requests_that_meet_every_limit() -> None:
    records = [
        record(0, 0.1, 0.2, tokens=11),  # 100 ms, 10 ms a token
        record(0, 0.3, 0.4, tokens=11),  # too late
        record(0, 0.1, 0.5, tokens=11),  # 40 ms a token
        record(0, 0.1, tokens=1),  # no time per token
        record(0, 0.1, 0.2, tokens=11, done=False),
    ]
    limits = {"ttft": 200.0, "tpot": 20.0}
    found = goodput(records, 10, 4.0, limits)
    assert found == {"goodput": limits, "request_goodput": 0.5, "good_share": 0.2}
    assert goodput(records, 10, 4.0, {"e2el": 150})["good_share"] == 0.1
    assert goodput(records, 10, 4.0, {"e2el": 200.001})["good_share"] == 0.2


def test_figures_have_every_metric_with_its_percentiles() -> None:
    records = [record(1, 2, 3, 5, tokens=7), record(1, 3, 4, 5, tokens=7)]
    found = figures(records, 2, 0, 10, percentiles=[50, 99.9])
    times = {name for name in found if name.endswith("_ms")}
    assert times == {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p99.9") for name in METRICS}
    assert found["mean_e2el_ms"] == 4000 and found["std_e2el_ms"] == 0
    # A piece of several tokens ends one gap.
    assert found["mean_itl_ms"] == pytest.approx(1250) and found["p50_itl_ms"] == 1000
    about = details(records[0], 0.5)
    assert about["sent_s"] == 0.5 and about["ttft_ms"] == 1000 and about["tpot_ms"] == 500
    assert (about["output_len"], about["pieces"], about["max_itl_ms"]) == (7, 3, 2000)


@pytest.mark.parametrize("knee", [0.07, 0.7, 1.0, 13.2, 900.0])
def test_the_search_ends_at_the_highest_rate(knee: float) -> None:
    shares: dict[float, float] = {}
    while (rate := next_rate(shares, 1.0, 1000.0)) is not None:
        assert rate not in shares
        shares[rate] = 1.0 if rate <= knee else 0.5
    found = highest_rate(shares)
    assert found is not None and found <= knee < found * 1.05 and len(shares) < 20


def test_a_search_that_finds_none_ends() -> None:
    shares: dict[float, float] = {}
    while (rate := next_rate(shares, 1.0, 1000.0)) is not None:
        shares[rate] = 0.98
    assert highest_rate(shares) is None and sorted(shares) == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]


def test_a_search_ends_where_requests_would_be_a_burst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = find_rate(tmp_path / "rates.json", {}, 1.0, 30, lambda rate, earlier: {"good_share": 1.0})
    assert [run["request_rate"] for run in found["runs"]] == [1.0, 2.0, 3.0] and found["highest_rate"] == 3.0
    assert "30 requests are too few for rates above 3 per second" in capsys.readouterr().out


def test_a_good_rate_above_a_bad_one_does_not_count() -> None:
    assert highest_rate({1: 1, 2: 0.9, 4: 1}) == 1 and next_rate({1: 1, 2: 0.9, 4: 1}, 1, 9) == 1.5


def test_a_search_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, settings, tried = tmp_path / "rates.json", {"goodput": {"ttft": 200.0}}, list[tuple[float, int]]()

    def measure(rate: float, earlier: int) -> dict[str, float]:
        tried.append((rate, earlier))
        if len(tried) == 3:
            raise KeyboardInterrupt
        return {"good_share": 1.0 if rate <= 3 else 0.0}

    with pytest.raises(KeyboardInterrupt):
        find_rate(path, settings, 2.0, 400, measure)
    found = find_rate(path, settings, 2.0, 400, measure)
    assert tried[:4] == [(2.0, 0), (4.0, 1), (3.0, 2), (3.0, 2)] and found["highest_rate"] == 3.0
    assert found == json.loads(path.read_text()) and len(found["runs"]) == len(tried) - 1
    assert "4 requests/s: 0.0 % within the limits" in capsys.readouterr().out
    assert find_rate(path, settings, 2.0, 400, measure) == found and len(found["runs"]) == len(tried) - 1
    with pytest.raises(ValueError, match="other values of goodput"):
        find_rate(path, {"goodput": {"ttft": 100.0}}, 2.0, 400, measure)
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a result file of this search"):
        find_rate(path, settings, 2.0, 400, measure)


@pytest.mark.parametrize("text", ["itl:20", "ttft", "ttft:0", "ttft:x"])
def test_limits_that_cannot_be(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        parse_goodput(text)
    assert parse_goodput("e2el:1.5") == ("e2el", 1.5)
