"""The files of a batch run. They are checked and locked before the model is loaded, because loading can take minutes.
They are never left half written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shadowkv.wording import counted

DIGEST = "batch_req_digest_"
"""Prefix of record ids that are made from a digest of the request. Earlier versions made random ids, without this
prefix."""


class Sink:
    """Appends lines to a file. If a line cannot be written in full, its beginning is removed and OSError is raised. On
    exit, all lines are synced to disk."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record."""
        rest = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode())
        # The end is looked up each time: a signal may have interrupted an earlier call anywhere.
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

    def __exit__(self, *_: object) -> None:
        with self._file:
            os.fsync(self._file.fileno())


@dataclass(frozen=True)
class BatchFiles:
    """The files of requests and answers; ``resume`` continues from existing answers."""

    input: Path
    output: Path
    resume: bool = False

    @property
    def target(self) -> Path:
        """The output file. If ``output`` is a symbolic link, this is the link's target, so that the link stays."""
        return Path(os.path.realpath(self.output))

    @property
    def partial(self) -> Path:
        """The file of the answers while the run is not complete."""
        return self.target.with_name(self.target.name + ".partial")

    @property
    def rewritten(self) -> Path:
        """The file to which a resumed run copies the answers of earlier runs. It then becomes the partial file."""
        return self.partial.with_name(self.partial.name + ".new")

    @property
    def lock(self) -> Path:
        """The lock file of the run that writes the output."""
        return self.target.with_name(self.target.name + ".lock")

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which the files are usable and no other run writes them. The operating system releases the
        lock of a crashed run.

        Raises ValueError, before anything is changed, if the files cannot be used or another run holds the lock.
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
            # The file is removed while it is locked: after the release, it could be another run's lock. No run can get
            # the lock on the removed file, because none waits for a lock.
            with suppress(OSError):  # Windows removes the file when the lock is released
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
        for path in (self.target, self.partial, self.rewritten, self.lock):
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
                f"--output {self.output} exists already; pass --resume to answer the missing requests, move it away or "
                "name another --output"
            )

    def begin(self, requests: Mapping[str, str]) -> set[str]:
        """Makes the partial file. With ``resume``, it begins with the answers of earlier runs. Returns the custom_ids
        of these answers.

        ``requests`` maps each request's custom_id to the id of its record. An answer is dropped if the request
        with its custom_id has changed since. Failures are dropped, too, because their causes may have been fixed.
        Raises ValueError, without any change, if a line of an earlier run is not a record.
        """
        answered: set[str] = set()
        if not self.resume:
            self.partial.open("xb").close()
            return answered
        self.rewritten.unlink(missing_ok=True)  # left by a run that crashed here
        try:
            with Sink(self.rewritten) as sink:
                for path in (self.partial, self.target):
                    for record in _records(path, half_a_line=path == self.partial):
                        name = record["custom_id"]
                        if name not in answered and _answers(record, requests.get(name)):
                            answered.add(name)
                            sink.write(record)
            _rename(self.rewritten, self.partial)
        finally:
            self.rewritten.unlink(missing_ok=True)
        return answered

    def kept(self, count: int) -> str:
        """Returns the message for an interrupted run. It names the file with the answers so far, and their number,
        ``count``. If there are none, removes the partial file."""
        if not count:
            self.partial.unlink(missing_ok=True)
            return "no answers yet"
        where = self.partial if self.partial.exists() else self.target
        return f"{where} has {counted(count, 'answer')}; --resume continues from there"

    def finish(self) -> None:
        """Makes the partial file the output."""
        _rename(self.partial, self.target)


def _rename(source: Path, target: Path) -> None:
    """Renames a file and syncs the new name to disk."""
    source.replace(target)
    if os.name == "posix":  # other systems cannot open a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _answers(record: dict[str, Any], request: str | None) -> bool:
    """Whether a record is a successful answer to the request that now has its custom_id. ``request`` is the record id
    of that request, or None if no request has the custom_id. An answer whose request is gone counts, too. So does an
    answer of an earlier version of this program, because its random id does not show whether the request has changed.
    """
    name, response, request_then = record["custom_id"], record.get("response"), str(record.get("id"))
    changed = request is not None and request_then.startswith(DIGEST) and request_then != request
    return name is not None and response is not None and response.get("status_code") == 200 and not changed


def _records(path: Path, half_a_line: bool) -> Iterator[dict[str, Any]]:
    """The records of a file; none if the file is missing. With ``half_a_line``, leaves out a last line that a crash
    has cut off."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if half_a_line and not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not _is_record(record):
                raise ValueError(f"{path} line {number} is not a record of a batch run; move the file away")
            yield record


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and isinstance(record.get("custom_id", 0), str | None)
        and all(isinstance(record.get(part), dict | None) for part in ("response", "error"))
    )
