"""Policies of eviction on small made-up traces."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.prefix_cache.eviction_replay import PAGE, SYSTEM, Trace, main


def test_a_trace_is_chats_that_go_on_in_order_of_time() -> None:
    asked = list(Trace(seed=1, requests=60, documents=4, turns=5, rate=0.1))
    times, prompts = [time for time, _ in asked], [tuple(tokens) for _, tokens in asked]
    assert len(asked) == 60 and times == sorted(times)
    assert len({prompt[: PAGE * SYSTEM] for prompt in prompts}) == 1
    going_on = sum(
        any(later[: len(prompt)] == prompt for later in prompts[i + 1 :]) for i, prompt in enumerate(prompts)
    )
    assert 30 <= going_on < 60
    assert asked == list(Trace(seed=1, requests=60, documents=4, turns=5, rate=0.1))


def test_the_graph_finds_no_less_of_questions_over_documents(tmp_path: Path) -> None:
    """Behind one system prompt, where an eighth of the documents has room in host memory: popular ones stay."""
    few = ["--seeds=1", "--requests=200", "--documents=60", "--turns=1", "--rates=1", "--host-shares=0.125"]
    file, link = tmp_path / "new" / "replay.csv", tmp_path / "link.csv"
    assert main([*few, "--out", str(file)]) == 0
    written = file.read_bytes()
    link.symlink_to(file)
    assert main([*few, "--out", str(link)]) == 0
    assert link.is_symlink(), "such as /dev/stdout"
    assert file.read_bytes() == written, "rows of an earlier run do not stay"
    with file.open(newline="", encoding="utf-8") as lines:
        lru, graph = csv.DictReader(lines)
    assert (lru["policy"], graph["policy"]) == ("lru", "graph")
    assert lru["hit_rate_device"] == graph["hit_rate_device"]
    assert float(graph["hit_rate_host"]) > float(lru["hit_rate_host"]) > 0
