"""Tables: means, errors and paired intervals by hand."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from predicted import predicted

from shadowkv.eval.outputs import needle_cells, write_outputs
from shadowkv.eval.plots import scores_of
from shadowkv.eval.report import COLUMNS, by_cell, markdown, rows
from shadowkv.eval.statistics import mean_and_error, paired_interval


def test_mean_and_error() -> None:
    # Deviations -1/2, 1/2, 1/2, -1/2: variance 1/3, error sqrt(1/3 / 4).
    assert mean_and_error([0, 1, 1, 0]) == (0.5, pytest.approx(math.sqrt(1 / 12)))
    mean, error = mean_and_error([0.25])
    assert mean == 0.25
    assert math.isnan(error)


def test_paired_interval() -> None:
    # Of four resampled pairs, -1 comes k times with Binomial(4, 1/4): P(k = 4) = 0.4 %, P(k >= 3) = 5.1 %.
    assert paired_interval([0, 0, 0, -1]) == (-0.75, 0)
    assert paired_interval([0.5, 0.5]) == (0.5, 0.5)
    assert all(math.isnan(bound) for bound in paired_interval([1]))
    low, high = paired_interval([0.0, 1.0] * 200)
    # The normal approximation: 0.5 -+ 1.96 * 0.5 / sqrt(400).
    assert (low, high) == (pytest.approx(0.451, abs=0.006), pytest.approx(0.549, abs=0.006))


def test_rows_of_the_csv() -> None:
    found = rows([predicted(s, i) for i, s in enumerate((0, 1, 1, 0))] + [predicted(1, 0, "quest@50")], "m")
    assert found == [
        ("m", "full", 1000, 1.0, "t", 0.5, round(math.sqrt(1 / 12), 6), 4),
        ("m", "quest", 1000, 0.05, "t", 1.0, "", 1),
    ]


def test_markdown_pairs_samples() -> None:
    full = [predicted(score, number) for number, score in enumerate((1, 1, 1, 1))]
    quest = [predicted(score, number, "quest@50") for number, score in enumerate((1, 1, 1, 0))]
    other = [predicted(1, 0, policy, "u") for policy in ("quest@50", "full")]
    table = [line for line in markdown(quest + full + other, "m").splitlines() if line.startswith("|")]
    assert table == [
        "| length | task | samples | full | quest@50 |",
        "| ---: | --- | ---: | ---: | ---: |",
        "| 1000 | t | 4 | 100.0 ± 0.0 | 75.0 ± 25.0 (-25.0, -75.0 to +0.0) |",
        "| 1000 | u | 1 | 100.0 | 100.0 (+0.0) |",
        "| 1000 | all | 5 | 100.0 ± 0.0 | 80.0 ± 20.0 (-20.0, -60.0 to +0.0) |",
    ]


def test_a_policy_with_fewer_samples_says_so() -> None:
    text = markdown([predicted(1, 0), predicted(0, 1), predicted(0, 1, "quest")], "m")
    assert "| 50.0 ± 50.0 | 0.0 (+0.0), n = 1 |" in text


def test_files(tmp_path: Path) -> None:
    needles = [
        predicted(score, policy=policy, task="niah_single", length=length)
        for policy in ("full", "quest")
        for length, score in ((1000, 1), (2000, 0))
    ]
    needles = [replace(p, id=f"{depth}-0", attended_tokens=p.length // 2) for p in needles for depth in (0, 50)]
    write_outputs(needles, "m", tmp_path)
    with (tmp_path / "summary.csv").open() as file:
        table = list(csv.reader(file))
    assert tuple(table[0]) == COLUMNS
    assert len(table) == 5
    plots = {"scores.png", "budgets.png", "niah_single_full.png", "niah_single_quest.png"}
    names = {"summary.csv", "summary.md", "niah.json", *plots}
    assert {path.name for path in tmp_path.iterdir()} == names  # and no temporary ones
    cell = {"task": "niah_single", "policy": "full", "length": 2000, "depth": 50.0, "score": 0.0, "samples": 1}
    assert cell in needle_cells(needles)
    assert len(needle_cells(needles)) == 8


def test_plots_are_of_what_both_have_answered(tmp_path: Path) -> None:
    """A run that was interrupted may have a task that full attention has not answered yet, or not all of it."""
    shared = [predicted(score, 0, policy) for policy, score in (("full", 1), ("quest", 0))]
    alone = [predicted(1, 1, "quest"), predicted(1, 0, "quest", task="another")]
    cells = by_cell([*shared, *alone])
    length, task = shared[0].length, shared[0].task
    assert scores_of(cells, (length, task), "quest", paired=True) == [-1]
    assert sorted(scores_of(cells, (length, task), "quest", paired=False)) == [0, 1]
    assert scores_of(cells, (length, "another"), "quest", paired=True) == []
    write_outputs([*shared, *alone], "m", tmp_path)
    assert (tmp_path / "scores.png").stat().st_size
