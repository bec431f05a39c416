"""Samples, the predictions to them, and result files that are never seen half-written: predictions grow line by line,
everything else is replaced at once."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One sample of a task.

    Attributes:
        task: name of its task, e.g. ``niah_single_1``.
        id: the same for every policy and every run with the same seed.
        turns: prompts, one per turn; the first holds the context. Plain text, tokenised unchanged.
        references: per turn, the texts that the metric compares the answer with.
        max_new_tokens: limit for every turn.
        metric: name in ``metrics.scoring.METRICS``.
        length: tokens of the longest sequence that the sample was made for, answers included.
    """

    task: str
    id: str
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    max_new_tokens: int
    metric: str
    length: int


@dataclass(frozen=True)
class Prediction:
    """What one policy answered to one sample: a line of predictions.jsonl.

    Attributes:
        task, id, length: the sample's.
        policy: label of the policy: ``kv``, and the requested budget.
        kv: the preset, with its changed fields.
        budget: share of ``length`` that a step may select; None where a server has the cache.
        predictions: answers, one per turn.
        score: mean of the turns' scores, in [0, 1].
        attended_tokens: per kv head, in the last step; None where a server has the cache.
        least_kept_energy: smallest share of the keys' energy that a layer kept, where keys are low-rank.
        output_tokens: of the answers, all turns together, without the tokens that end them; as a server counts them
            where it does, otherwise None, as in folders from before the field.
        seconds: the policy's own time: decoding, and prefill of later turns, of a batch divided by its samples; the
            whole request where a server answers.
        prefill_seconds: the first prompt's prefill with everything that the requested policies store.
    """

    task: str
    id: str
    length: int
    policy: str
    kv: str
    budget: float | None
    predictions: list[str]
    score: float
    seconds: float
    prefill_seconds: float | None = None
    attended_tokens: int | None = None
    least_kept_energy: float | None = None
    output_tokens: int | None = None

    @property
    def sample(self) -> tuple[str, int, str]:
        """What identifies the sample: task, length, id."""
        return self.task, self.length, self.id


class PredictionFile:
    """predictions.jsonl: what it holds already, and new lines, each on disk before the next sample begins.

    A last line that was truncated by a crash is dropped; any other invalid line raises ValueError.
    """

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        complete_lines = content[: content.rfind(b"\n") + 1]
        self.path, self.predictions = path, _parsed(complete_lines, path)
        if len(complete_lines) < len(content):
            os.truncate(path, len(complete_lines))

    def answered(self) -> set[tuple[tuple[str, int, str], str]]:
        """Samples and labels of the policies that answered them."""
        return {(prediction.sample, prediction.policy) for prediction in self.predictions}

    def append(self, prediction: Prediction) -> None:
        """Adds a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(prediction), ensure_ascii=False) + "\n")
        self.predictions.append(prediction)


def read_predictions(folder: Path) -> list[Prediction]:
    """Those of a run, from predictions.jsonl or, where that is not there, the same compressed. Raises OSError where
    neither can be read, ValueError for a line that is no prediction."""
    plain, compressed = folder / "predictions.jsonl", folder / "predictions.jsonl.gz"
    if plain.exists():
        return _parsed(plain.read_bytes(), plain)
    with gzip.open(compressed) as file:
        return _parsed(file.read(), compressed)


def _parsed(lines: bytes, path: Path) -> list[Prediction]:
    predictions = []
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            predictions.append(Prediction(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no prediction: {error}") from error
    return predictions


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces ``path`` once everything is written."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text``."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Replaces ``path`` by ``value`` as JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
