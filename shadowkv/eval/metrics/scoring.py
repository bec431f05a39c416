"""The metrics by name. A metric scores an answer against its references, in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable

from shadowkv.eval.metrics.infinitebench import INFINITEBENCH_METRICS
from shadowkv.eval.metrics.longbench import LONGBENCH_METRICS
from shadowkv.eval.metrics.mrcr import mrcr
from shadowkv.eval.records.predictions import Sample

Metric = Callable[[str, tuple[str, ...]], float]
LOOP = 256
"""Minimum length of a loop in characters, about 64 tokens. Shorter repetitions are legitimate, for example horizontal
rules and tables."""


def string_match_all(prediction: str, references: tuple[str, ...]) -> float:
    """Returns the share of the references that the answer contains, ignoring case (RULER, arXiv:2404.06654: all
    tasks but QA)."""
    answer = prediction.lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def string_match_part(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the answer contains any of the references, ignoring case (RULER: QA)."""
    answer = prediction.lower()
    return float(any(reference.lower() in answer for reference in references))


def exact_match(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the answer's first line is one of the references, apart from surrounding white space."""
    lines = prediction.strip().splitlines()
    return float(bool(lines) and lines[0].strip() in {reference.strip() for reference in references})


def ends_in_loop(text: str) -> bool:
    """Whether the text ends in a loop: a string that repeats at least three times in a row, over at least ``LOOP``
    characters in all."""
    for cycle in range(1, len(text) // 3 + 1):
        loop = text[-max(LOOP, 3 * cycle) :]
        if len(loop) >= LOOP and loop[cycle:] == loop[:-cycle]:
            return True
    return False


def no_loop(prediction: str, references: tuple[str, ...]) -> float:
    """Returns 1 unless the answer ends in a loop. ``references`` are ignored, because there is no right answer."""
    return float(not ends_in_loop(prediction))


METRICS: dict[str, Metric] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "exact_match": exact_match,
    "no_loop": no_loop,
    "mrcr": mrcr,
    **LONGBENCH_METRICS,
    **INFINITEBENCH_METRICS,
}


def score(sample: Sample, predictions: list[str]) -> float:
    """Mean score of a sample's turns."""
    metric = METRICS[sample.metric]
    scores = [metric(prediction, references) for prediction, references in zip(predictions, sample.references)]
    return sum(scores) / len(scores)
