"""Reads figures from benchmarks/results, and formats numbers for tables."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sweeps.rows import read
from shadowkv.eval.records.policies import BASELINE
from shadowkv.eval.records.predictions import read_predictions
from shadowkv.eval.reports.statistics import mean_and_error, paired_interval
from shadowkv.eval.reports.summary import ALL, by_cell, labels, score, values

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NONE = "–"
"""Content of a cell whose figure was not measured."""


@functools.cache
def lines(path: str) -> tuple[dict[str, str], ...]:
    """Returns the lines of a CSV file in benchmarks/results."""
    return tuple(read(RESULTS / path))


@functools.cache
def report(path: str) -> Any:
    """Returns the content of a JSON file in benchmarks/results."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def matching(path: str, **where: object) -> list[dict[str, str]]:
    """Returns the lines of a CSV file whose columns have the values ``where``. Numbers are compared as numbers."""
    return [line for line in lines(path) if all(_equal(line[column], value) for column, value in where.items())]


def line(path: str, **where: object) -> dict[str, str]:
    """Returns the only line of a CSV file whose columns have the values ``where``.

    Raises:
        LookupError: if no line or several lines have these values.
    """
    found = matching(path, **where)
    if len(found) != 1:
        raise LookupError(f"{len(found)} lines of {path} have {where}, and not one")
    return found[0]


def number(path: str, column: str, **where: object) -> float:
    """Returns a figure of a CSV file, from the only line whose columns have the values ``where``."""
    return float(line(path, **where)[column])


def _equal(text: str, value: object) -> bool:
    return float(text) == value if isinstance(value, int | float) and text else text == str(value)


class Score(NamedTuple):
    """A policy's score on one task or over all tasks, in per cent, and its paired difference to ``full`` with the
    bounds of a 95 % interval, in points. ``full`` has no difference. ``decimals`` is the number of decimals with which
    the difference is shown."""

    score: float
    difference: tuple[float, float, float] | None
    decimals: int = 1

    def __str__(self) -> str:
        """Returns the difference and its interval, in bold if the interval excludes 0. For ``full``, returns the
        score."""
        if self.difference is None:
            return f"{self.score:.1f}"
        points, low, high = (signed(value, self.decimals) for value in self.difference)
        text = f"{points} ({low} to {high})"
        return f"**{text}**" if low[0] == high[0] != "0" else text


SCORE = re.compile(r"([\d.]+) ± [\d.]+(?: \(([+-][\d.]+), ([+-][\d.]+) to ([+-][\d.]+)\))?")


@functools.cache
def ruler(folder: str) -> dict[tuple[int, str, str], Score]:
    """Returns scores by length, task (``all`` means over all tasks) and policy. They are read from the ``summary.md``
    of an evaluation in a folder of benchmarks/results."""
    parts = (
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in (RESULTS / folder / "summary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    )
    _, _, _, *policies = next(parts)
    scores = {}
    for length, task, _, *cells in parts:
        for policy, cell in zip(policies, cells, strict=True):
            if found := SCORE.match(cell):
                score, points, low, high = found.groups()
                difference = (float(points), float(low), float(high)) if points else None
                scores[int(length), task, policy] = Score(float(score), difference)
    return scores


@functools.cache
def pooled(folder: str) -> dict[str, Score]:
    """Returns scores by policy over all tasks and seeds. The folder in benchmarks/results has one evaluation per seed,
    all of the same length."""
    predictions = [answer for seed in sorted((RESULTS / folder).iterdir()) for answer in read_predictions(seed)]
    (cell,) = (answers for (_, task), answers in by_cell(predictions).items() if task == ALL)
    scores = {}
    for policy in labels(predictions):
        mean = 100 * mean_and_error(*values(cell, policy, score))[0]
        scores[policy] = Score(mean, None)
        if policy != BASELINE:
            lost = values(cell, policy, score, paired=True)
            low, high = paired_interval(*lost)
            scores[policy] = Score(mean, (100 * mean_and_error(*lost)[0], 100 * low, 100 * high), 2)
    return scores


def signed(value: float, decimals: int = 1) -> str:
    """Returns points as text with a sign and ``decimals`` decimals. Zero has no sign."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


def whole(value: float) -> str:
    """Returns a number as text without decimals, with commas between groups of three digits."""
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """Returns seconds as text with about three digits."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def times(value: float) -> str:
    """Returns a ratio as text, such as ``1.23×``; from 3 on it has one decimal."""
    return f"{value:.1f}×" if value >= 3 else f"{value:.2f}×"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown. Columns of numbers are aligned to the right, except the first column."""
    lines = [list(head), *map(list, rows)]
    numbers = [all(re.match(r"[-+*\d–]", cell) for cell in column) for column in zip(*lines[1:], strict=True)]
    numbers[0] = False
    lines.insert(1, ["---:" if number else "---" for number in numbers])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("|  |", "| |")
