"""How similar policies' answers to MRCR's samples are to full attention's answers: mrcr.csv, and a section of
summary.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shadowkv.eval.metrics.mrcr import similarity
from shadowkv.eval.records.policies import BASELINE
from shadowkv.eval.records.predictions import Prediction
from shadowkv.eval.reports.statistics import (
    Estimate,
    markdown_table,
    mean_and_error,
    paired_interval,
    rounded,
    with_error,
)
from shadowkv.eval.reports.summary import by_cell, labels, values


@dataclass(frozen=True)
class Row:
    """A policy's answers to the samples of a length and task.

    Attributes:
        pairs: number of answers to samples that full attention has answered too.
        similarity: mean of ``metrics.mrcr.similarity`` between the policy's and full attention's answer to a sample,
            over the pairs.
        interval: 95 % confidence interval of ``similarity``; NaN for a single pair.
    """

    length: int
    task: str
    policy: str
    pairs: int
    similarity: Estimate
    interval: tuple[float, float]


def summarise(predictions: Sequence[Prediction]) -> Iterator[Row]:
    """Yields a row per length, task and policy. There is no row for full attention itself, nor for a policy without
    pairs."""
    for (length, task), cell in by_cell(predictions).items():
        baseline = cell.get(BASELINE, {})

        def alike(answer: Prediction, baseline: dict[tuple[str, int, str], Prediction] = baseline) -> float | None:
            full = baseline.get(answer.sample)
            return None if full is None else similarity(answer.predictions[0], full.predictions[0])

        for label in labels(predictions):
            pairs = [] if label == BASELINE else values(cell, label, alike)
            if pairs:
                count = sum(map(len, pairs))
                yield Row(length, task, label, count, mean_and_error(*pairs), paired_interval(*pairs))


def csv_rows(rows: Sequence[Row], model: str) -> Iterator[list[object]]:
    """Yields the lines of mrcr.csv."""
    names = ("similarity", "similarity_stderr", "similarity_low", "similarity_high")
    yield ["model", "policy", "length", "task", "pairs", *names]
    for row in rows:
        figures = (*rounded(row.similarity), *rounded(row.interval))
        yield [model, row.policy, row.length, row.task, row.pairs, *figures]


def markdown(rows: Sequence[Row]) -> str:
    """The section of summary.md."""
    table = [["length", "task", "policy", "samples", f"similarity to `{BASELINE}`, %", "95 % interval"]]
    table.append(["---:", "---", "---", "---:", "---:", "---:"])
    for row in rows:
        low, high = row.interval
        interval = "–" if math.isnan(low) else f"{100 * low:.1f} to {100 * high:.1f}"
        table.append([str(row.length), row.task, row.policy, str(row.pairs), with_error(row.similarity, 100), interval])
    note = (
        f"MRCR: how alike answers are to `{BASELINE}`'s answer to the same sample, right or wrong"
        " (`difflib.SequenceMatcher`'s ratio)."
    )
    return markdown_table(note, table)
