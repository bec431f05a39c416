"""Tables of an evaluation: summary.csv and summary.md, regenerated from all predictions."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from shadowkv.eval.files import Prediction, replacing, write_text
from shadowkv.eval.statistics import mean_and_error, paired_interval

COLUMNS = ("model", "kv", "length", "budget", "task", "score", "stderr", "samples")
BASELINE = "full"
ALL = "all"
"""The row over all tasks of a length."""

Scores = dict[tuple[str, int, str], float]
Cells = dict[tuple[int, str], dict[str, Scores]]


def write_summary(predictions: Sequence[Prediction], model: str, folder: Path) -> None:
    """Writes both tables."""
    with replacing(folder / "summary.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(predictions, model))
    write_text(folder / "summary.md", markdown(predictions, model))


def rows(predictions: Sequence[Prediction], model: str) -> list[tuple[str | int | float, ...]]:
    """Rows of summary.csv: score and stderr in [0, 1]; a single sample's stderr and a server's budget are empty."""
    groups: dict[tuple[str, int, float | None, str, str], list[float]] = defaultdict(list)
    for p in predictions:
        groups[p.kv, p.length, p.budget, p.task, p.policy].append(p.score)
    table: list[tuple[str | int | float, ...]] = []
    for (kv, length, budget, task, _), scores in groups.items():
        mean, error = mean_and_error(scores)
        shown = "" if math.isnan(error) else round(error, 6)
        table.append((model, kv, length, "" if budget is None else budget, task, round(mean, 6), shown, len(scores)))
    return sorted(table, key=lambda row: (row[2], row[4], [p.kv for p in predictions].index(str(row[1])), str(row[3])))


def by_cell(predictions: Sequence[Prediction]) -> Cells:
    """Scores by length and task, then by policy, then by sample; ``ALL`` is over the tasks of a length."""
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for p in predictions:
        cells[p.length, p.task][p.policy][p.sample] = p.score
    for length in sorted({p.length for p in predictions}):
        tasks = sorted(task for other, task in cells if other == length)
        if len(tasks) > 1:
            for task in tasks:
                for policy, scores in cells[length, task].items():
                    cells[length, ALL][policy].update(scores)
    return dict(sorted(cells.items(), key=lambda item: (item[0][0], item[0][1] == ALL, item[0][1])))


def labels(predictions: Sequence[Prediction]) -> list[str]:
    """Labels of the policies, full attention first, then in order of appearance."""
    return sorted(dict.fromkeys(p.policy for p in predictions), key=lambda label: label != BASELINE)


def markdown(predictions: Sequence[Prediction], model: str) -> str:
    """The table to read, in per cent."""
    policies = labels(predictions)
    head = ["length", "task", "samples", *policies]
    table = [head, ["---:", "---", *(["---:"] * (len(head) - 2))]]
    for (length, task), cell in by_cell(predictions).items():
        samples = max(map(len, cell.values()))
        shown = [_shown(cell.get(label, {}), {} if label == BASELINE else cell.get(BASELINE, {})) for label in policies]
        counts = [f", n = {len(cell[p])}" if p in cell and len(cell[p]) < samples else "" for p in policies]
        table.append([str(length), task, str(samples), *(text + count for text, count in zip(shown, counts))])
    notes = [
        f"Model `{model}`. Scores in per cent ± standard error; after `@` the budget, as a share or in tokens."
        f" In brackets: difference to `{BASELINE}` on the same samples, 95 % interval (paired bootstrap).",
        "",
    ]
    return "\n".join([*notes, *("| " + " | ".join(line) + " |" for line in table)]) + "\n"


def _shown(scores: Scores, baseline: Scores) -> str:
    if not scores:
        return "–"
    mean, error = mean_and_error(list(scores.values()))
    text = f"{100 * mean:.1f}" + ("" if math.isnan(error) else f" ± {100 * error:.1f}")
    differences = [score - baseline[sample] for sample, score in scores.items() if sample in baseline]
    if not differences:
        return text
    low, high = paired_interval(differences)
    interval = "" if math.isnan(low) else f", {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{text} ({100 * sum(differences) / len(differences):+.1f}{interval})"
