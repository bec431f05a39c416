"""Results of an ablation (``--vary``): a table and a plot of a measured figure against the values of the varied
field."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowkv.eval.records.policies import without_field
from shadowkv.eval.records.predictions import Prediction, write_csv
from shadowkv.eval.reports.colours import styles
from shadowkv.eval.reports.plots import bar_length, new_figure, save_figure, set_logarithmic
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.eval.reports.summary import scores_by_task

COLUMNS = ("model", "length", "kv", "value", "mean", "stderr", "samples")


@dataclass(frozen=True)
class Point:
    """The mean of the measured figure for a policy at a length.

    Attributes:
        kv: the policy without the field.
        value: the field's value, as text; None if the policy does not set it.
    """

    length: int
    kv: str
    value: str | None
    mean: float
    error: float
    samples: int


def write_score_ablation(field: str, predictions: Sequence[Prediction], model: str, folder: Path) -> None:
    """Writes the table and the plot of an ablation: the mean score over all tasks, for each value of ``field``."""
    answers: dict[tuple[int, str], list[Prediction]] = {}
    for p in predictions:
        answers.setdefault((p.length, p.policy), []).append(p)
    samples = {point: scores_by_task(answered) for point, answered in answers.items()}
    write_ablation(field, "score", "score over all tasks, per cent", samples, model, folder)


def write_ablation(
    field: str, measure: str, words: str, samples: dict[tuple[int, str], list[list[float]]], model: str, folder: Path
) -> None:
    """Writes the table, and the plot if matplotlib is installed.

    Args:
        field: the varied field.
        measure: the figure's name in the table.
        words: the figure's name in the plot.
        samples: figures of the samples by length and the policy's label, as one list per task.
    """
    measured = points(field, samples)
    write_variation(field, measure, measured, model, folder)
    if importlib.util.find_spec("matplotlib") is not None:
        plot_variation(field, words, measured, measure == "score", model, folder / f"vary_{field}.png")


def points(field: str, samples: dict[tuple[int, str], list[list[float]]]) -> list[Point]:
    """Returns one point for each length and policy. ``samples`` are as for ``write_ablation``."""
    return [
        Point(length, *without_field(label, field), *mean_and_error(*tasks), sum(map(len, tasks)))
        for (length, label), tasks in samples.items()
    ]


def write_variation(field: str, measure: str, points: Sequence[Point], model: str, folder: Path) -> None:
    """Writes vary_<field>.csv.

    Args:
        measure: the figure's name in the table.
    """
    table: list[list[object]] = [[*COLUMNS[:3], field, measure, *COLUMNS[5:]]]
    for point in points:
        error = "" if math.isnan(point.error) else f"{point.error:.3g}"
        table.append([model, point.length, point.kv, point.value or "", f"{point.mean:.6g}", error, point.samples])
    write_csv(folder / f"vary_{field}.csv", table)


def plot_variation(field: str, words: str, all_points: Sequence[Point], share: bool, title: str, path: Path) -> None:
    """Plots a panel per length and a line per policy. A policy that does not set the field is a horizontal dotted line.

    Args:
        words: the figure's name.
        share: whether the figure is a share, shown in per cent. Otherwise the scale is logarithmic, and zeros are left
            out.
    """
    values = sorted({point.value for point in all_points if point.value is not None}, key=_order(all_points))
    lengths = sorted({point.length for point in all_points})
    policies = list(dict.fromkeys(point.kv for point in all_points))
    style_of, unit = styles(policies), 100 if share else 1
    figure, axes = new_figure(1, len(lengths), (6, 4.2))
    for axis, length in zip(axes, lengths):
        for number, kv in enumerate(policies):
            of_policy = [point for point in all_points if (point.length, point.kv) == (length, kv)]
            if not share:
                of_policy = [point for point in of_policy if point.mean > 0]
            for point in of_policy:
                if point.value is None:
                    axis.axhline(unit * point.mean, color=style_of[kv]["color"], linestyle=":", label=kv)
            drawn = sorted(
                (values.index(point.value), point.mean, point.error) for point in of_policy if point.value is not None
            )
            if drawn:
                places, means, errors = zip(*drawn)
                beside = 0.03 * (number - len(policies) / 2)  # shifts points sideways, so that equal ones stay visible
                style = {"capsize": 3, "label": kv, **style_of[kv]}
                bars = [unit * bar_length(error) for error in errors]
                axis.errorbar([place + beside for place in places], [unit * mean for mean in means], bars, **style)
        axis.set_xticks(range(len(values)), values)
        axis.set_xlabel(field)
        axis.set_title(f"{length} tokens of context", fontsize=10)
        axis.grid(alpha=0.3)
        if share:
            axis.set_ylim(-3, 103)
        else:
            set_logarithmic(axis, "y")
    axes[0].set_ylabel(words)
    axes[0].legend(fontsize=8)
    figure.suptitle(title)
    save_figure(figure, path)


def _order(points: Sequence[Point]) -> Callable[[str], float]:
    """Returns a sort key for values: numbers by size, names in order of appearance."""
    came = list(dict.fromkeys(point.value for point in points if point.value is not None))
    try:
        return {value: float(value) for value in came}.__getitem__
    except ValueError:
        return lambda value: float(came.index(value))
