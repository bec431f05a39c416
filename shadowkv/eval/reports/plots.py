"""Plots of an evaluation: score by task, score by attended tokens, and the depth x length heatmap of needles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shadowkv.eval.records.policies import BASELINE
from shadowkv.eval.records.predictions import Prediction, replacing
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.eval.reports.summary import by_cell, labels, score, scores_by_task, values


def plot_scores(predictions: Sequence[Prediction], model: str, path: Path) -> None:
    """A panel per length, a row per task, a dot per policy with its standard error: the paired difference to full
    attention, or the score if full attention was not requested or nothing else was."""
    cells = by_cell(predictions)
    tasks = list(dict.fromkeys(task for _, task in cells))
    lengths = sorted({length for length, _ in cells})
    policies = labels(predictions)
    paired = policies[0] == BASELINE and len(policies) > 1
    shown = policies[paired:]
    figure, axes = new_figure(1, len(lengths), (5.2, 1.6 + len(tasks) * (0.2 + 0.06 * len(shown))))
    for axis, length in zip(axes, lengths):
        for number, label in enumerate(shown):
            beside = 0.8 * ((number + 0.5) / len(shown) - 0.5)
            scores_by_row = [
                (row + beside, values(cells.get((length, task), {}), label, score, paired))
                for row, task in enumerate(tasks)
            ]
            points = [(y, *mean_and_error(*scores)) for y, scores in scores_by_row if scores]
            if points:
                y, means, errors = zip(*points)
                style = {"fmt": "o", "markersize": 4, "capsize": 2, "color": colour(number), "label": label}
                axis.errorbar([100 * x for x in means], y, xerr=[100 * bar_length(x) for x in errors], **style)
        for row in range(1, len(tasks)):
            axis.axhline(row - 0.5, color="0.85", linewidth=0.8)
        axis.set_yticks(range(len(tasks)), tasks, fontsize=9)
        axis.set_ylim(len(tasks) - 0.5, -0.5)
        axis.axvline(0, color="0.4", linewidth=1)
        axis.set_title(f"{length:,} tokens of context", fontsize=10)
        axis.set_xlabel(f"difference to {BASELINE}, points" if paired else "score, per cent")
        axis.grid(alpha=0.3, axis="x")
    add_legend(figure)
    figure.suptitle(model)
    save_figure(figure, path)


def plot_budgets(predictions: Sequence[Prediction], model: str, path: Path) -> None:
    """Mean score over all tasks by attended tokens, a panel per length: a line per policy through all its budgets."""
    lengths = sorted({p.length for p in predictions})
    presets = list(dict.fromkeys(p.kv for p in sorted(predictions, key=lambda p: p.kv != BASELINE)))
    figure, axes = new_figure(1, len(lengths), (5.6, 4.2))
    for axis, length in zip(axes, lengths):
        for number, kv in enumerate(presets):
            points = _points([p for p in predictions if (p.length, p.kv) == (length, kv)])
            if not points:
                continue
            attended, scores, errors = zip(*points)
            axis.errorbar(attended, scores, errors, marker="o", capsize=3, color=colour(number), label=kv)
            if kv == BASELINE:
                axis.axhline(scores[0], color=colour(number), linestyle=":", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_title(f"{length} tokens of context", fontsize=10)
        axis.set_xlabel("tokens attended per kv head and step")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("score over all tasks, per cent")
    add_legend(figure)
    figure.suptitle(model)
    save_figure(figure, path)


def _points(predictions: Sequence[Prediction]) -> list[tuple[float, float, float]]:
    """Mean tokens attended, mean score and its error in per cent, for each policy; fewest tokens first."""
    points = []
    for label in labels(predictions):
        chosen = [p for p in predictions if p.policy == label and p.attended_tokens is not None]
        if chosen:
            mean, error = mean_and_error(*scores_by_task(chosen))
            attended = sum(p.attended_tokens or 0 for p in chosen) / len(chosen)
            points.append((attended, 100 * mean, 100 * bar_length(error)))
    return sorted(points)


def bar_length(error: float) -> float:
    """Length of an error bar; 0 for a single sample, which has no error."""
    return 0.0 if math.isnan(error) else error


def colour(number: int) -> Any:
    """One of twenty colours; the first ten are those of matplotlib's cycle."""
    from matplotlib import colormaps

    return colormaps["tab20"](number % 10 * 2 + number // 10 % 2)


def add_legend(figure: Any) -> None:
    """Lists what is drawn, once each, below the panels."""
    named = {name: line for axis in figure.axes for line, name in zip(*axis.get_legend_handles_labels())}
    width = max(map(len, named), default=1) / 15 + 0.6  # width of an entry in inches
    columns = max(1, min(len(named), int(figure.get_figwidth() / width)))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure, and its panels row by row, each ``size`` inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    return figure, axes


def set_logarithmic(axis: Any, which: str) -> None:
    """Makes an axis, ``x`` or ``y``, logarithmic with labels at 1, 2 and 5, so that a single decade has some too; only
    at 1 if the data spans three decades or more."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axis, f"set_{which}scale")("log")
    ticks = getattr(axis, f"{which}axis")
    low, high = getattr(axis, f"get_{which}lim")()
    ticks.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    ticks.set_major_formatter("{x:g}")
    ticks.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: Path) -> None:
    """Writes it as PNG; panels without data are left blank."""
    for axis in figure.axes:
        if not axis.has_data():
            axis.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)
