"""The outputs of ``--vary``, from what a run has answered or measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from shadowkv.eval.fidelity.measured import Measured
from shadowkv.eval.records.predictions import Prediction
from shadowkv.eval.reports.ablation import plot_variation, points, write_variation
from shadowkv.eval.reports.summary import scores_by_task


def of_scores(field: str, predictions: Sequence[Prediction], model: str, folder: Path) -> None:
    """Mean score over all tasks against the values of ``field``."""
    answers: dict[tuple[int, str], list[Prediction]] = {}
    for p in predictions:
        answers.setdefault((p.length, p.policy), []).append(p)
    samples = {point: scores_by_task(answered) for point, answered in answers.items()}
    _write(field, "score", "score over all tasks, per cent", samples, model, folder)


def of_divergence(field: str, measured: Sequence[Measured], model: str, tokens: int, folder: Path) -> None:
    """Mean KL over prompts of ``tokens`` tokens against the values of ``field``."""
    samples: dict[tuple[int, str], list[list[float]]] = {}
    for one in measured:
        samples.setdefault((tokens, one.policy), [[]])[0].append(one.mean_kl)
    _write(field, "mean_kl", "mean KL to full attention, nats per token", samples, model, folder)


def _write(
    field: str, measure: str, words: str, samples: dict[tuple[int, str], list[list[float]]], model: str, folder: Path
) -> None:
    found = points(field, samples)
    write_variation(field, measure, found, model, folder)
    if importlib.util.find_spec("matplotlib") is not None:
        plot_variation(field, words, found, measure == "score", model, folder / f"vary_{field}.png")
