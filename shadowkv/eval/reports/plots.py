"""Plots of an evaluation: score by task and score by attended tokens. Other modules use the functions for matplotlib
figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shadowkv.eval.records.policies import BASELINE
from shadowkv.eval.records.predictions import Prediction, replacing
from shadowkv.eval.reports.colours import styles
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.eval.reports.summary import by_cell, labels, score, scores_by_task, values


def plot_scores(predictions: Sequence[Prediction], model: str, path: Path) -> None:
    """Plots a panel per length, a row per task, and a dot per policy with its standard error. A dot is the mean
    difference of a policy's scores to full attention's on the same samples. If full attention is missing or is the only
    policy, a dot is the mean score."""
    cells = by_cell(predictions)
    tasks = list(dict.fromkeys(task for _, task in cells))
    lengths = sorted({length for length, _ in cells})
    policies = labels(predictions)
    paired = policies[0] == BASELINE and len(policies) > 1
    shown, style_of = policies[paired:], styles(policies)
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
                style = {"linestyle": "", "markersize": 4, "capsize": 2, "label": label, **style_of[label]}
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
    """Plots the mean score over all tasks by attended tokens: a panel per length, and a line per policy through all its
    budgets."""
    lengths = sorted({p.length for p in predictions})
    presets = list(dict.fromkeys(p.kv for p in sorted(predictions, key=lambda p: p.kv != BASELINE)))
    style_of = styles(presets)
    figure, axes = new_figure(1, len(lengths), (5.6, 4.2))
    for axis, length in zip(axes, lengths):
        for kv in presets:
            points = _points([p for p in predictions if (p.length, p.kv) == (length, kv)])
            if not points:
                continue
            attended, scores, errors = zip(*points)
            axis.errorbar(attended, scores, errors, capsize=3, label=kv, **style_of[kv])
            if kv == BASELINE:
                axis.axhline(scores[0], color=style_of[kv]["color"], linestyle=":", linewidth=1)
        set_logarithmic(axis, "x", base=2)
        axis.set_title(f"{length:,} tokens of context", fontsize=10)
        axis.set_xlabel("tokens attended per kv head and step")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("score over all tasks, per cent")
    add_legend(figure)
    figure.suptitle(model)
    save_figure(figure, path)


def _points(predictions: Sequence[Prediction]) -> list[tuple[float, float, float]]:
    """Returns each policy's mean attended tokens, mean score in per cent, and the score's standard error. The policy
    with the fewest tokens comes first."""
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


def add_legend(figure: Any) -> None:
    """Adds a legend below the panels, with each label once."""
    named = {name: line for axis in figure.axes for line, name in zip(*axis.get_legend_handles_labels())}
    width = max(map(len, named), default=1) / 15 + 0.6  # width of an entry in inches
    columns = max(1, min(len(named), int(figure.get_figwidth() / width)))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Returns a figure and its panels row by row. Each panel is ``size`` inches wide and high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    return figure, axes


def set_logarithmic(axis: Any, which: str, base: int = 10) -> None:
    """Makes an axis, ``x`` or ``y``, logarithmic. Call it after the data is drawn. The axis is labelled at powers of
    ``base``. For base 10, it is also labelled at 2 and 5 times these powers, unless it spans three decades. If this
    gives fewer than two labels, the axis is labelled at equal distances."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

    getattr(axis, f"set_{which}scale")("log", base=base)
    ticks = getattr(axis, f"{which}axis")
    low, high = getattr(axis, f"get_{which}lim")()
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    steps = (1, 2, 5) if base == 10 and high < 1000 * low else (1,)
    labelled = [tick for power in powers for step in steps if low <= (tick := step * base**power) <= high]
    ticks.set_major_locator(FixedLocator(labelled) if len(labelled) > 1 else MaxNLocator(4))
    ticks.set_major_formatter("{x:,.6g}")
    ticks.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as PNG; panels without data are left blank."""
    for axis in figure.axes:
        if not axis.has_data():
            axis.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)
