"""The files of a batch run: checked and locked before minutes go into loading a model, and never half written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

Answered = tuple[str | None, str | None]
"""What tells records apart: the custom_id, and what was wrong with the line if it was no request."""


def identity(record: dict[str, Any]) -> Answered:
    """Of a record of the output."""
    return record.get("custom_id"), (record.get("error") or {}).get("message")


class Sink:
    """Appends lines to a file; a line that does not fit is taken back, and OSError raised. At its end they are on the
    disk."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record."""
        rest = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode())
        # Asked each time: a signal may have ended an earlier call anywhere.
        length = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException as error:
            self._file.truncate(length)
            if isinstance(error, OSError):
                raise OSError(f"cannot write {self._path}: {error.strerror or error}") from error
            raise

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            os.fsync(self._file.fileno())


@dataclass(frozen=True)
class BatchFiles:
    """Where the requests are and where the answers go; ``resume`` goes on with the answers that are there."""

    input: Path
    output: Path
    resume: bool = False

    @property
    def target(self) -> Path:
        """The output, or what it is a symbolic link to: the link stays one."""
        return Path(os.path.realpath(self.output))

    @property
    def partial(self) -> Path:
        """Holds the answers until all are there."""
        return self.target.with_name(self.target.name + ".partial")

    @property
    def lock(self) -> Path:
        """Locked by the run that writes the output."""
        return self.target.with_name(self.target.name + ".lock")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, the files can be used and no other run writes them; the system frees those of a run that crashed.

        Raises ValueError, before anything is changed, if they cannot be used or another run has them.
        """
        self._check_names()
        lock = FileLock(self.lock)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"another run is writing --output {self.output}; wait for its end or name another --output"
            ) from error
        try:
            self._check_answers()
            yield
        finally:
            # While it is held, so that it is nobody else's. Nobody waits for it either: others give up at once.
            with suppress(OSError):  # Windows, where it goes with the release
                self.lock.unlink()
            lock.release()

    def _check_names(self) -> None:
        if not self.input.is_file():
            raise ValueError(f"--input {self.input} is not a file")
        if not os.access(self.input, os.R_OK):
            raise ValueError(f"--input {self.input} cannot be read")
        if not self.target.parent.is_dir():
            raise ValueError(f"--output {self.output}: the folder {self.target.parent} does not exist")
        if self.target.exists() and not self.target.is_file():
            raise ValueError(f"--output {self.output} cannot be written: it is no regular file")
        if not os.access(self.target.parent, os.W_OK):
            raise ValueError(f"--output {self.output} cannot be written: the folder {self.target.parent} is read-only")
        for path in (self.target, self.partial, self.lock):
            if path.exists() and path.samefile(self.input):
                raise ValueError(
                    f"--output {self.output} would overwrite the requests: {path} is the same file as --input "
                    f"{self.input}; name another --output"
                )

    def _check_answers(self) -> None:
        if self.resume:
            return
        if self.partial.exists():
            raise ValueError(f"{self.partial} holds the answers of an interrupted run; pass --resume or move it away")
        if self.target.exists():
            raise ValueError(
                f"--output {self.output} exists already; pass --resume to answer what it does not, move it away or "
                "name another --output"
            )

    def begin(self) -> dict[Answered, Any]:
        """Makes the partial file, with the records of earlier runs if they are wanted; returns those records' ids.

        Raises ValueError where a line of theirs is no record.
        """
        answered: dict[Answered, Any] = {}
        if not self.resume:
            self.partial.open("xb").close()
            return answered
        if self.partial.exists():
            _drop_half_a_line(self.partial)
            answered = {identity(record): record.get("id") for record in _records(self.partial)}
        with Sink(self.partial) as sink:
            for record in _records(self.target) if self.target.exists() else ():
                if identity(record) not in answered:
                    answered[identity(record)] = record.get("id")
                    sink.write(record)
        return answered

    def finish(self) -> None:
        """Makes the partial file the output, for good: the new name is on the disk too."""
        self.partial.replace(self.target)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            folder = os.open(self.target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _drop_half_a_line(path: Path) -> None:
    """Takes off the end of a file what a crash left there of a line."""
    with path.open("r+b") as file:
        end = 0
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
        file.truncate(end)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or "custom_id" not in record:
                raise ValueError(f"{path} line {number} is no record of a batch run; move the file away")
            yield record
