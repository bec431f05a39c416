"""Samples, predictions, and functions that write result files. No file is ever half-written: predictions.jsonl grows
line by line, and all other files are replaced as a whole."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One sample of a task.

    Attributes:
        task: name of its task, e.g. ``niah_single_1``.
        id: number or name within the task, the same for every policy and in every run with the same seed.
        turns: prompts, one per turn. The first has the context. Prompts are tokenized as they are, without a chat
            template.
        references: per turn, the texts that the metric compares the answer with.
        max_new_tokens: limit for every turn.
        metric: name in ``metrics.scoring.METRICS``.
        length: maximum tokens of the sample's sequence, answers included.
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
    """One policy's answers to one sample: a line of predictions.jsonl.

    Attributes:
        task, id, length: the sample's.
        policy: label of the policy: ``kv``, and after an ``@`` the requested budget.
        kv: the preset, and after a colon its changed fields, except the budget.
        budget: share of ``length`` that a step can select; None if a server has the cache.
        predictions: answers, one per turn.
        score: mean of the turns' scores, in [0, 1].
        attended_tokens: tokens that a kv head attends to in the last step; None if a server has the cache.
        least_kept_energy: smallest share of the keys' energy that a layer kept, if keys are low-rank.
        output_tokens: number of tokens of all turns' answers, without end tokens. If a server answers, it is the
            server's own count. None if the server does not report one, and in folders of older versions.
        seconds: time that this policy takes for decoding and for the prefill of later turns, divided by the number of
            samples in the batch. For a server, the time of all requests of the sample.
        prefill_seconds: time of the first prompt's prefill, which fills the caches of all requested policies; None for
            a server.
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
        """The sample's identity: task, length, id."""
        return self.task, self.length, self.id


class PredictionFile:
    """Reads predictions.jsonl, and appends a line to it for each prediction.

    If a crash has truncated the last line, the line is removed. Any other invalid line raises ValueError.
    """

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        complete_lines = content[: content.rfind(b"\n") + 1]
        self.path, self.predictions = path, _parsed(complete_lines, path)
        if len(complete_lines) < len(content):
            os.truncate(path, len(complete_lines))

    def answered(self) -> set[tuple[tuple[str, int, str], str]]:
        """Returns pairs of a sample's identity and the label of a policy that has answered the sample."""
        return {(prediction.sample, prediction.policy) for prediction in self.predictions}

    def append(self, prediction: Prediction) -> None:
        """Adds a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(prediction), ensure_ascii=False) + "\n")
        self.predictions.append(prediction)


def read_predictions(folder: Path) -> list[Prediction]:
    """Returns the predictions in a folder, from predictions.jsonl or, if there is none, from predictions.jsonl.gz.
    Raises OSError if neither can be read, and ValueError for an invalid line."""
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
            raise ValueError(f"{path}, line {number} is not a prediction: {error}") from error
    return predictions


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context manager that yields a temporary path. At the end of the context, the file at this path replaces
    ``path``."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces the file ``path`` with one that contains ``text``."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Replaces the file ``path`` with one that contains ``rows`` as CSV."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def write_json(path: Path, value: Any) -> None:
    """Replaces the file ``path`` with one that contains ``value`` as JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
