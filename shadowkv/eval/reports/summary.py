"""Tables of an evaluation: summary.csv and summary.md. They are written anew from all predictions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowkv.eval.records.policies import BASELINE
from shadowkv.eval.records.predictions import Prediction, write_csv, write_text
from shadowkv.eval.reports.statistics import (
    Estimate,
    markdown_table,
    mean_and_error,
    paired_interval,
    rounded,
    with_error,
)

COLUMNS = (
    *("model", "kv", "length", "budget", "task", "score", "stderr", "samples"),
    *("pairs", "difference", "difference_stderr", "difference_low", "difference_high"),
    *("output_tokens", "output_tokens_stderr", "output_tokens_difference", "output_tokens_difference_stderr"),
)
ALL = "all"
"""Task name of rows over all tasks of a length."""

Answers = dict[tuple[str, int, str], Prediction]
"""Predictions by the sample's identity (``Prediction.sample``)."""
Cells = dict[tuple[int, str], dict[str, Answers]]
Figure = Callable[[Prediction], float | None]


@dataclass(frozen=True)
class Row:
    """A policy's answers to the samples of a length and task.

    Attributes:
        length, task: length and task of the samples; ``ALL`` means all tasks of the length.
        policy, kv, budget: as in ``Prediction``.
        samples: number of answers.
        pairs: number of answers to samples that full attention has answered too.
        score: mean score, in [0, 1].
        difference: mean of the score minus full attention's score on the same sample, over the pairs. None for full
            attention itself, and if there are no pairs.
        interval: 95 % confidence interval of ``difference``; NaN for a single pair.
        output_tokens: mean number of tokens of a sample's answers, all turns together; None if no prediction has the
            number.
        output_tokens_difference: mean of the number minus full attention's on the same sample, over the pairs.
    """

    length: int
    task: str
    policy: str
    kv: str
    budget: float | None
    samples: int
    pairs: int
    score: Estimate
    difference: Estimate | None
    interval: tuple[float, float] | None
    output_tokens: Estimate | None
    output_tokens_difference: Estimate | None


def write_summary(predictions: Sequence[Prediction], model: str, folder: Path, section: str = "") -> None:
    """Writes both tables; ``section`` is a suite's own section at the end of summary.md."""
    summary = summarise(predictions)
    write_csv(folder / "summary.csv", (COLUMNS, *rows(summary, model)))
    write_text(folder / "summary.md", "\n".join(filter(None, (markdown(summary, model), section))))


def summarise(predictions: Sequence[Prediction]) -> list[Row]:
    """Returns a row per length, task and policy. ``ALL`` is the last task of a length, and full attention the first
    policy of a task."""
    summary = []
    for (length, task), cell in by_cell(predictions).items():
        for label in labels(predictions):
            if label not in cell:
                continue
            answers = list(cell[label].values())
            scores, tokens = values(cell, label, score), values(cell, label, output_tokens)
            differences = [] if label == BASELINE else values(cell, label, score, paired=True)
            longer = [] if label == BASELINE else values(cell, label, output_tokens, paired=True)
            summary.append(
                Row(
                    length,
                    task,
                    label,
                    answers[0].kv,
                    answers[0].budget,
                    len(answers),
                    sum(map(len, differences)),
                    mean_and_error(*scores),
                    mean_and_error(*differences) if differences else None,
                    paired_interval(*differences) if differences else None,
                    mean_and_error(*tokens) if tokens else None,
                    mean_and_error(*longer) if longer else None,
                )
            )
    return summary


def by_cell(predictions: Sequence[Prediction]) -> Cells:
    """Returns answers by length and task, then by policy, then by sample. The task ``ALL`` has the answers of all tasks
    of a length."""
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for p in predictions:
        cells[p.length, p.task][p.policy][p.sample] = p
    for length in sorted({p.length for p in predictions}):
        tasks = sorted(task for other, task in cells if other == length)
        if len(tasks) > 1:
            for task in tasks:
                for policy, answers in cells[length, task].items():
                    cells[length, ALL][policy].update(answers)
    return dict(sorted(cells.items(), key=lambda item: (item[0][0], item[0][1] == ALL, item[0][1])))


def labels(predictions: Sequence[Prediction]) -> list[str]:
    """Labels of the policies, full attention first, then in order of appearance."""
    return sorted(dict.fromkeys(p.policy for p in predictions), key=lambda label: label != BASELINE)


def score(prediction: Prediction) -> float:
    return prediction.score


def output_tokens(prediction: Prediction) -> int | None:
    return prediction.output_tokens


def values(cell: dict[str, Answers], label: str, figure: Figure, paired: bool = False) -> list[list[float]]:
    """Returns a figure of a policy's answers, in a list per task. Samples without the figure are left out.

    Args:
        cell: answers by policy.
        paired: whether to subtract the figure of full attention's answer to the same sample.
    """
    tasks: dict[str, list[float]] = defaultdict(list)
    baseline = cell.get(BASELINE, {})
    for sample, answer in cell.get(label, {}).items():
        value = figure(answer)
        subtracted = 0 if not paired else figure(baseline[sample]) if sample in baseline else None
        if value is not None and subtracted is not None:
            tasks[answer.task].append(value - subtracted)
    return list(tasks.values())


def scores_by_task(predictions: Sequence[Prediction]) -> list[list[float]]:
    """Scores of all predictions, in a list per task."""
    tasks: dict[str, list[float]] = defaultdict(list)
    for p in predictions:
        tasks[p.task].append(p.score)
    return list(tasks.values())


def rows(summary: Sequence[Row], model: str) -> list[tuple[str | int | float, ...]]:
    """Returns the rows of summary.csv. Scores are in [0, 1]. Missing values, such as the error of a single sample, are
    empty."""
    return [
        (
            *(model, row.kv, row.length, "" if row.budget is None else row.budget, row.task),
            *(*rounded(row.score), row.samples),
            *(row.pairs, *rounded(row.difference), *rounded(row.interval)),
            *(*rounded(row.output_tokens), *rounded(row.output_tokens_difference)),
        )
        for row in summary
    ]


def markdown(summary: Sequence[Row], model: str) -> str:
    """Returns the text of summary.md: a table with scores in per cent."""
    policies = sorted(dict.fromkeys(row.policy for row in summary), key=lambda label: label != BASELINE)
    head = ["length", "task", "samples", *policies]
    table = [head, ["---:", "---", *(["---:"] * (len(head) - 2))]]
    cells: dict[tuple[int, str], dict[str, Row]] = defaultdict(dict)
    for row in summary:
        cells[row.length, row.task][row.policy] = row
    for (length, task), cell in cells.items():
        samples = max(row.samples for row in cell.values())
        shown = [_shown(cell[label], samples) if label in cell else "–" for label in policies]
        table.append([str(length), task, str(samples), *shown])
    notes = [
        f"Model `{model}`. Scores in per cent ± standard error; after `@` the budget, as a share or in tokens."
        f" In brackets: difference to `{BASELINE}` on the same samples, 95 % interval (paired bootstrap)."
    ]
    if any(row.output_tokens is not None for row in summary):
        notes.append(f" Then mean output tokens, in brackets their paired difference to `{BASELINE}` ± standard error.")
    return markdown_table("".join(notes), table)


def _shown(row: Row, samples: int) -> str:
    text = with_error(row.score, 100)
    if row.difference is not None and row.interval is not None:
        low, high = row.interval
        interval = "" if math.isnan(low) else f", {100 * low:+.1f} to {100 * high:+.1f}"
        text += f" ({100 * row.difference[0]:+.1f}{interval})"
    if row.output_tokens is not None:
        text += f"; {with_error(row.output_tokens, 1)} tokens"
    if row.output_tokens_difference is not None:
        text += f" ({with_error(row.output_tokens_difference, 1, '+')})"
    return text + (f", n = {row.samples}" if row.samples < samples else "")
