"""Tables: means, errors and paired intervals by hand."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from predicted import predicted

from shadowkv.eval.reports.outputs import needle_cells, write_outputs
from shadowkv.eval.reports.statistics import mean_and_error, paired_interval
from shadowkv.eval.reports.summary import COLUMNS, by_cell, markdown, output_tokens, rows, score, summarise, values


def test_mean_and_error() -> None:
    # Deviations -1/2, 1/2, 1/2, -1/2: variance 1/3, error sqrt(1/3 / 4).
    assert mean_and_error([0, 1, 1, 0]) == (0.5, pytest.approx(math.sqrt(1 / 12)))
    mean, error = mean_and_error([0.25])
    assert mean == 0.25
    assert math.isnan(error)


def test_tasks_that_differ_do_not_widen_the_error_of_their_mean() -> None:
    tasks = ([0.0, 1.0, 1.0, 0.0], [10.0, 10.0, 12.0, 12.0])
    mean, error = mean_and_error(*tasks)
    assert mean == 5.75
    assert error == pytest.approx(math.sqrt(sum(mean_and_error(task)[1] ** 2 for task in tasks)) / 2)
    low, high = paired_interval(*tasks)
    assert (low, high) == (pytest.approx(5.75 - 1.96 * error, abs=0.15), pytest.approx(5.75 + 1.96 * error, abs=0.15))
    # A task of one sample shows no deviation: all are one sample then.
    assert mean_and_error([1.0], [0.0, 2.0]) == mean_and_error([1.0, 0.0, 2.0])


def test_paired_interval() -> None:
    # Of four resampled pairs, -1 comes k times with Binomial(4, 1/4): P(k = 4) = 0.4 %, P(k >= 3) = 5.1 %.
    assert paired_interval([0, 0, 0, -1]) == (-0.75, 0)
    assert paired_interval([0.5, 0.5]) == (0.5, 0.5)
    assert all(math.isnan(bound) for bound in paired_interval([1]))
    low, high = paired_interval([0.0, 1.0] * 200)
    # The normal approximation: 0.5 -+ 1.96 * 0.5 / sqrt(400).
    assert (low, high) == (pytest.approx(0.451, abs=0.006), pytest.approx(0.549, abs=0.006))


def test_rows_of_the_csv() -> None:
    full = [predicted(s, i, output_tokens=10 * i) for i, s in enumerate((0, 1, 1, 0))]
    quest = [predicted(0, number, "quest@50", output_tokens=25) for number in (1, 3, 9)]
    found = rows(summarise([*full, *quest, predicted(1, 0, "turbo")]), "m")
    assert found == [
        ("m", "full", 1000, 1.0, "t", 0.5, 0.288675, 4, 0, *[""] * 4, 15.0, 6.454972, "", ""),
        # Differences of the two samples that both have: -1 and 0 points, 15 and -5 tokens.
        ("m", "quest", 1000, 0.05, "t", 0.0, 0.0, 3, 2, -0.5, 0.5, -1.0, 0.0, 25.0, 0.0, 5.0, 10.0),
        ("m", "turbo", 1000, 0.05, "t", 1.0, "", 1, 1, 1.0, "", "", "", *[""] * 4),
    ]


def test_a_loss_of_one_task_is_read_off_its_row() -> None:
    """The gate "no task loses more than 3 points with an interval that excludes 0", from the lines of the CSV alone."""
    lost = {"a": 10, "b": 1, "all": 11}
    answers = [
        predicted(float(policy == "full" or number >= lost[task]), number, policy, task)
        for policy in ("full", "turbo")
        for task in ("a", "b")
        for number in range(20)
    ]
    lines = [dict(zip(COLUMNS, row)) for row in rows(summarise(answers), "m")]
    turbo = {str(line["task"]): line for line in lines if line["kv"] == "turbo"}
    assert {task: line["difference"] for task, line in turbo.items()} == {"a": -0.5, "b": -0.05, "all": -0.275}
    failed = [
        task for task, line in turbo.items() if float(line["difference"]) < -0.03 and float(line["difference_high"]) < 0
    ]
    assert failed == ["a", "all"]
    errors = [float(turbo[task]["difference_stderr"]) for task in ("a", "b", "all")]
    assert errors[2] == pytest.approx(math.hypot(*errors[:2]) / 2, abs=1e-6)


def test_markdown_pairs_samples() -> None:
    full = [predicted(score, number) for number, score in enumerate((1, 1, 1, 1))]
    quest = [predicted(score, number, "quest@50") for number, score in enumerate((1, 1, 1, 0))]
    other = [predicted(1, 0, policy, "u") for policy in ("quest@50", "full")]
    table = [line for line in markdown(summarise(quest + full + other), "m").splitlines() if line.startswith("|")]
    assert table == [
        "| length | task | samples | full | quest@50 |",
        "| ---: | --- | ---: | ---: | ---: |",
        "| 1000 | t | 4 | 100.0 ± 0.0 | 75.0 ± 25.0 (-25.0, -75.0 to +0.0) |",
        "| 1000 | u | 1 | 100.0 | 100.0 (+0.0) |",
        "| 1000 | all | 5 | 100.0 ± 0.0 | 80.0 ± 20.0 (-20.0, -60.0 to +0.0) |",
    ]


def test_a_policy_with_fewer_samples_says_so() -> None:
    text = markdown(summarise([predicted(1, 0), predicted(0, 1), predicted(0, 1, "quest")]), "m")
    assert "| 50.0 ± 50.0 | 0.0 (+0.0), n = 1 |" in text


def test_markdown_pairs_output_tokens() -> None:
    """Predictions of before, without the number of tokens, are shown without it, beside those that have it."""
    full = [predicted(1, number, output_tokens=tokens) for number, tokens in enumerate((10, 20, 30))]
    longer = [predicted(1, number, "turbo", output_tokens=tokens) for number, tokens in enumerate((11, 21, 34))]
    text = markdown(summarise([*full, *longer, *(predicted(1, number, "quest") for number in range(3))]), "m")
    assert text.splitlines()[-1] == (
        "| 1000 | t | 3 | 100.0 ± 0.0; 20.0 ± 5.8 tokens"
        " | 100.0 ± 0.0 (+0.0, +0.0 to +0.0); 22.0 ± 6.7 tokens (+2.0 ± 1.0) | 100.0 ± 0.0 (+0.0, +0.0 to +0.0) |"
    )
    assert "tokens" not in markdown(summarise([predicted(1, 0)]), "m").splitlines()[-1]


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
    assert values(cells[length, task], "quest", score, paired=True) == [[-1]]
    assert values(cells[length, task], "quest", score) == [[0, 1]]
    assert values(cells[length, "another"], "quest", score, paired=True) == []
    assert values(cells[length, task], "quest", output_tokens) == []
    write_outputs([*shared, *alone], "m", tmp_path)
    assert (tmp_path / "scores.png").stat().st_size
