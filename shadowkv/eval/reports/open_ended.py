"""Tables of open-ended answers: open_ended.csv, and a section of summary.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shadowkv.eval.metrics.overlap import qa_f1
from shadowkv.eval.metrics.scoring import ends_in_loop
from shadowkv.eval.records.policies import BASELINE
from shadowkv.eval.records.predictions import Prediction
from shadowkv.eval.reports.statistics import Estimate, markdown_table, mean_and_error, rounded, with_error
from shadowkv.eval.reports.summary import Answers, by_cell, labels, output_tokens, values
from shadowkv.eval.suites import open_ended

FIGURES: dict[str, Callable[[Prediction], float | None]] = {
    "output_tokens": output_tokens,
    "ended": lambda p: None if p.output_tokens is None else float(p.output_tokens < open_ended.NEW_TOKENS),
    "looping": lambda p: float(ends_in_loop(p.predictions[0])),
}
"""Figures of a single answer: its tokens, whether it ended before the limit, and whether it ends in a loop."""
SHARES = ("ended", "looping", "agreement")


@dataclass(frozen=True)
class Row:
    """A policy's answers to the samples of a length and task.

    Attributes:
        figures: means of ``FIGURES`` and of ``agreement`` (``_agreement``), by name.
        differences: means of ``FIGURES`` minus full attention's figure on the same sample, by name.
    """

    length: int
    task: str
    policy: str
    samples: int
    figures: dict[str, Estimate]
    differences: dict[str, Estimate]


def summarise(predictions: Sequence[Prediction]) -> Iterator[Row]:
    """Yields a row per length, task and policy. Figures that no prediction has are left out."""
    for (length, task), cell in by_cell(predictions).items():
        for label in filter(cell.__contains__, labels(predictions)):
            means = {name: values(cell, label, figure) for name, figure in FIGURES.items()}
            paired: dict[str, list[list[float]]] = {}
            if label != BASELINE:
                paired = {name: values(cell, label, figure, paired=True) for name, figure in FIGURES.items()}
                means["agreement"] = values(cell, label, _agreement(cell.get(BASELINE, {})))
            yield Row(length, task, label, len(cell[label]), _estimates(means), _estimates(paired))


def csv_rows(rows: Sequence[Row], model: str) -> Iterator[list[object]]:
    """Yields the lines of open_ended.csv; missing figures are empty."""
    names = (*FIGURES, "agreement")
    head = [column for name in names for column in (name, f"{name}_stderr")]
    head += [column for name in FIGURES for column in (f"{name}_difference", f"{name}_difference_stderr")]
    yield ["model", "policy", "length", "task", "samples", *head]
    for row in rows:
        cells = [cell for name in names for cell in rounded(row.figures.get(name))]
        cells += [cell for name in FIGURES for cell in rounded(row.differences.get(name))]
        yield [model, row.policy, row.length, row.task, row.samples, *cells]


def markdown(rows: Sequence[Row]) -> str:
    """The section of summary.md."""
    head = ["length", "task", "policy", "samples", "output tokens", *(f"{name}, %" for name in SHARES)]
    table = [head, ["---:", "---", "---", *(["---:"] * (len(head) - 3))]]
    for row in rows:
        cells = [_shown(row, name, 100 if name in SHARES else 1) for name in ("output_tokens", *SHARES)]
        table.append([str(row.length), row.task, row.policy, str(row.samples), *cells])
    note = (
        f"Open-ended answers: output tokens, share of answers that ended before the limit of {open_ended.NEW_TOKENS}"
        f" tokens, share that ends in a loop (the score above is 1 minus this share), agreement with `{BASELINE}`'s"
        f" answer (F1 of words); ± standard error, in brackets the paired difference to `{BASELINE}`."
    )
    return markdown_table(note, table)


def _agreement(baseline: Answers) -> Callable[[Prediction], float | None]:
    """Returns the figure ``agreement``: F1 between the words of an answer and those of full attention's answer to the
    same sample. The figure is None if full attention has not answered the sample."""
    return lambda p: qa_f1(p.predictions[0], baseline[p.sample].predictions[0]) if p.sample in baseline else None


def _estimates(by_name: dict[str, list[list[float]]]) -> dict[str, Estimate]:
    return {name: mean_and_error(*tasks) for name, tasks in by_name.items() if tasks}


def _shown(row: Row, name: str, scale: float) -> str:
    if name not in row.figures:
        return "–"
    text = with_error(row.figures[name], scale)
    return text + (f" ({with_error(row.differences[name], scale, '+')})" if name in row.differences else "")
