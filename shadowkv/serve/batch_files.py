"""The files of a batch run: checked before minutes go into loading a model, and never half written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

Answered = tuple[str | None, str | None]
"""What tells records apart: the custom_id, and what was wrong with the line if it was no request."""


def identity(record: dict[str, Any]) -> Answered:
    """Of a record of the output."""
    return record.get("custom_id"), (record.get("error") or {}).get("message")


class Sink:
    """Appends lines to a file; a line that does not fit is taken back, and OSError raised."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)
        self._length = self._file.tell()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record."""
        rest = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode())
        total = len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException as error:
            self._file.truncate(self._length)
            if isinstance(error, OSError):
                raise OSError(f"cannot write {self._path}: {error.strerror or error}") from error
            raise
        self._length += total

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@dataclass(frozen=True)
class BatchFiles:
    """Where the requests are and where the answers go; ``resume`` goes on with the answers that are there."""

    input: Path
    output: Path
    resume: bool = False

    @property
    def partial(self) -> Path:
        """Holds the answers until all are there."""
        return self.output.with_name(self.output.name + ".partial")

    def check(self) -> None:
        """Raises ValueError if the files cannot be used."""
        if not self.input.is_file():
            raise ValueError(f"--input {self.input} is not a file")
        if not os.access(self.input, os.R_OK):
            raise ValueError(f"--input {self.input} cannot be read")
        if not self.output.parent.is_dir():
            raise ValueError(f"--output {self.output}: the folder {self.output.parent} does not exist")
        if self.output.is_dir() or not os.access(self.output.parent, os.W_OK):
            raise ValueError(f"--output {self.output} cannot be written")
        if self.partial.exists() and not self.resume:
            raise ValueError(f"{self.partial} holds the answers of an interrupted run; pass --resume or move it away")

    def begin(self) -> set[Answered]:
        """Makes the partial file, with the records of earlier runs if they are wanted, and says which those are."""
        answered: set[Answered] = set()
        if not self.resume:
            self.partial.open("xb").close()
            return answered
        end = 0
        for record, ends in _records(self.partial):
            answered.add(identity(record))
            end = ends
        if self.partial.exists():
            os.truncate(self.partial, end)  # a line that a crash left half written
        with Sink(self.partial) as sink:
            for record, _ in _records(self.output):
                if identity(record) not in answered:
                    answered.add(identity(record))
                    sink.write(record)
        return answered


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole records of a file, which may not exist, and where each ends; stops at one that is not whole."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or "custom_id" not in record:
                raise ValueError(f"{path} line {number} is no record of a batch run; move the file away")
            end += len(line)
            yield record, end
