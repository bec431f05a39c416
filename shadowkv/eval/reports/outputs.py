"""Writes all outputs that are made from the predictions: tables, plots, and the scores of needle tests by depth and
length."""

from __future__ import annotations

import importlib.util
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shadowkv.eval.records.predictions import Prediction, write_csv, write_json
from shadowkv.eval.reports import mrcr as mrcr_tables
from shadowkv.eval.reports import open_ended as open_ended_tables
from shadowkv.eval.reports.plots import new_figure, plot_budgets, plot_scores, save_figure
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.eval.reports.summary import labels, write_summary
from shadowkv.eval.suites import mrcr, niah, open_ended

DARK = 35
"""Distance of a score from 50 per cent, in points. Cells of a heatmap beyond this distance are dark, and their numbers
are white."""


def write_outputs(predictions: Sequence[Prediction], model: str, folder: Path) -> None:
    """Writes all outputs. Plots are written only if matplotlib is installed."""
    open_answers = [p for p in predictions if p.task in open_ended.TASKS]
    section = ""
    if open_answers:
        rows = list(open_ended_tables.summarise(open_answers))
        write_csv(folder / "open_ended.csv", open_ended_tables.csv_rows(rows, model))
        section = open_ended_tables.markdown(rows)
    if pairs := list(mrcr_tables.summarise([p for p in predictions if p.task in mrcr.TASKS])):
        write_csv(folder / "mrcr.csv", mrcr_tables.csv_rows(pairs, model))
        section = mrcr_tables.markdown(pairs)
    write_summary(predictions, model, folder, section)
    needles = [p for p in predictions if p.task in niah.TASKS]
    if needles:
        write_json(folder / "niah.json", needle_cells(needles))
    if importlib.util.find_spec("matplotlib") is None:
        return
    plot_scores(predictions, model, folder / "scores.png")
    if any(p.attended_tokens for p in predictions):
        plot_budgets(predictions, model, folder / "budgets.png")
    for task in sorted({p.task for p in needles}):
        for label in labels(needles):
            chosen = [p for p in needles if (p.task, p.policy) == (task, label)]
            if chosen:
                path = folder / (re.sub(r"[^\w.-]", "_", f"{task}_{label}") + ".png")
                plot_needles(chosen, lambda p: niah.depth_of(p.id), f"{model}, {label}: {task}", path)


def needle_cells(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Returns one object per task, policy, length and depth, with the mean score in [0, 1] and number of samples."""
    cells: dict[tuple[str, str, int, float], list[float]] = {}
    for p in predictions:
        cells.setdefault((p.task, p.policy, p.length, niah.depth_of(p.id)), []).append(p.score)
    names = ("task", "policy", "length", "depth")
    return [
        {**dict(zip(names, cell)), "score": mean_and_error(scores)[0], "samples": len(scores)}
        for cell, scores in sorted(cells.items())
    ]


def plot_needles(
    predictions: Sequence[Prediction], depth: Callable[[Prediction], float], title: str, path: Path
) -> None:
    """Plots a heatmap of the mean scores of one task under one policy: rows are depths in per cent, columns are
    lengths, and colours go from red to green."""
    lengths, depths = sorted({p.length for p in predictions}), sorted({depth(p) for p in predictions})
    cells: dict[tuple[float, int], list[float]] = {}
    for p in predictions:
        cells.setdefault((depth(p), p.length), []).append(p.score)
    means = [[_mean(cells.get((row, length), [])) for length in lengths] for row in depths]
    figure, (axis,) = new_figure(1, 1, (3.5 + 0.7 * len(lengths), 2.5 + 0.3 * len(depths)))
    image = axis.imshow(means, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    for y, row in enumerate(means):
        for x, mean in enumerate(row):
            words = "" if math.isnan(mean) else f"{mean:.0f}"
            on_dark = abs(mean - 50) > DARK  # both ends of the colour scale are dark
            axis.text(x, y, words, ha="center", va="center", fontsize=9, color="white" if on_dark else "black")
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], rotation=45)
    axis.set_yticks(range(len(depths)), [f"{row:g}" for row in depths])
    axis.set_xlabel("tokens of context")
    axis.set_ylabel("depth of the needle, per cent")
    axis.set_title(textwrap.fill(title, 44), fontsize=9)
    figure.colorbar(image, label="score, per cent")
    save_figure(figure, path)


def _mean(scores: list[float]) -> float:
    return 100 * sum(scores) / len(scores) if scores else math.nan
