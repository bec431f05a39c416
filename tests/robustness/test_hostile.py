"""Bodies made to cost, small ones: all are answered, and what others notice is measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from robustness import hostile


@pytest.mark.slow
def test_a_live_server(tmp_path):
    out = tmp_path / "hostile.json"
    attacks = ["a small request", "messages of numbers", "text beyond the limit", "a chain of references"]
    flags = ["--mib", "0.5", "--clients", "2", "--limit-ms", "60000", "--out", str(out), "--attacks", *attacks]
    done = subprocess.run([sys.executable, "-m", hostile.__name__, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["ok"] and [*found["attacks"]] == attacks and found["commit"]
    for name, figures in found["attacks"].items():
        assert figures["statuses"] == {"200" if name == "a small request" else "400": 2}
        assert 0 < figures["health_p50_ms"] <= figures["health_p99_ms"]
        assert figures["rss_mib"] > 50 and figures["others_latency_s"] > 0
    assert found["attacks"]["messages of numbers"]["rss_of_processes_mib"] > 10


def test_every_attack_has_about_the_size_that_is_asked_for():
    for name, (_, make) in hostile.ATTACKS.items():
        assert len(make(2**20)) <= 2**20, name
