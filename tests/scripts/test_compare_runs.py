"""Runs of a suite beside one another."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import compare_runs
import pytest


def run(folder: Path, scores: dict[str, float], compressed: bool = False) -> Path:
    """A run's predictions; a score of 1 is answered with "yes"."""
    lines = "".join(
        json.dumps(
            {
                **{"task": name[0], "id": name, "length": 4096, "policy": "full", "kv": "full", "budget": 1.0},
                **{"predictions": ["yes" if score else "no"], "score": score, "seconds": 1.0},
            }
        )
        + "\n"
        for name, score in scores.items()
    )
    folder.mkdir()
    path = folder / "predictions.jsonl"
    if compressed:
        path.with_name("predictions.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return folder


def test_samples_of_both_are_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = run(tmp_path / "one", {"a1": 1, "a2": 0, "b1": 1, "b2": 1, "b3": 0})
    other = run(tmp_path / "other", {"b2": 1, "a2": 1, "b1": 1, "a1": 1, "c1": 0}, compressed=True)
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(one), str(other)])
    assert compare_runs.main() == 0
    words = capsys.readouterr().out.splitlines()[1].split()
    assert words[:5] == ["4096", "full", "75.0", "100.0", "-25.00"] and words[-3:] == ["3", "of", "4"]


def test_runs_that_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = run(tmp_path / "one", {"a1": 1}), run(tmp_path / "other", {"a2": 1})
    for path, words in ((other, "no sample and policy in common"), (tmp_path / "none", "predictions.jsonl")):
        monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(one), str(path)])
        assert compare_runs.main() == 2 and words in capsys.readouterr().err
