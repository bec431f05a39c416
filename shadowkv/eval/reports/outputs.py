"""Everything that is regenerated from all predictions: tables, plots, and the cells of needle tests."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shadowkv.eval.records.predictions import Prediction, write_json
from shadowkv.eval.reports import open_ended as open_ended_tables
from shadowkv.eval.reports.plots import plot_budgets, plot_needles, plot_scores
from shadowkv.eval.reports.statistics import mean_and_error
from shadowkv.eval.reports.summary import labels, write_summary
from shadowkv.eval.suites import niah, open_ended


def write_outputs(predictions: Sequence[Prediction], model: str, folder: Path) -> None:
    """Writes them; plots only if matplotlib is installed."""
    open_answers = [p for p in predictions if p.task in open_ended.TASKS]
    section = ""
    if open_answers:
        rows = list(open_ended_tables.summarise(open_answers))
        open_ended_tables.write_csv(rows, model, folder / "open_ended.csv")
        section = open_ended_tables.markdown(rows)
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
    """One object per task, policy, length and depth: its mean score in [0, 1] and its number of samples."""
    cells: dict[tuple[str, str, int, float], list[float]] = {}
    for p in predictions:
        cells.setdefault((p.task, p.policy, p.length, niah.depth_of(p.id)), []).append(p.score)
    names = ("task", "policy", "length", "depth")
    return [
        {**dict(zip(names, cell)), "score": mean_and_error(scores)[0], "samples": len(scores)}
        for cell, scores in sorted(cells.items())
    ]
