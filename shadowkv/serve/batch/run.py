"""Answers a file of requests in OpenAI's batch format.

For each line ``{"custom_id", "method": "POST", "url", "body"}``, the output has a record, which is a line ``{"id",
"custom_id", "response", "error"}``. The order of the records can differ from that of the requests. Each record is
written as soon as its answer is complete, to a ``.partial`` file that is renamed at the end. An interrupted run can be
resumed: ``custom_id`` shows which requests have been answered. ``id``, a digest of the request, shows whether a request
has changed since. Failed and changed requests are answered again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tqdm import tqdm

from shadowkv.command_line import one_line
from shadowkv.log_format import escaped
from shadowkv.serve.batch.files import BatchFiles, Sink
from shadowkv.serve.batch.lines import URLS, BatchLines, LineRequest
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.wording import counted

MAX_REASONS = 10
"""Maximum number of reasons that the report lists separately."""

OTHER_REASONS = "other reasons, see the output"


class BatchFailed(Exception):
    """The rest of a file cannot be answered."""


@dataclass
class BatchRun:
    """One pass over a file. The constructor raises ValueError if earlier answers are invalid, and OSError if they
    cannot be copied.

    Attributes:
        urls, line_limit: as for ``BatchLines``.
        shows_progress: whether a progress bar (or lines in a log) is written.
        total: number of lines that are not empty.
        done: number of records that this run has written.
        skipped: number of lines that earlier runs have answered.
        failed: number of this run's records that are errors.
        tokens: number of generated tokens.
        reasons: for each reason of a failure, the number of failures, and a text with the custom_id of the first one.
        start: when the run began, in seconds of ``time.monotonic``.
    """

    files: BatchFiles
    urls: Sequence[str] = URLS
    line_limit: int | None = None
    shows_progress: bool = True
    total: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)
    start: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        self.lines = BatchLines(self.files, self.urls, self.line_limit)

    @property
    def written(self) -> int:
        """Bytes of all records so far."""
        path = self.files.partial if self.files.partial.exists() else self.files.target
        return path.stat().st_size

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which records can be written. If it is left without an error, the partial file becomes the
        output: every line must have a record by then."""
        with self.files.input.open("rb") as source:
            self.total = sum(1 for line in source if line.strip())
        with (
            Sink(self.files.partial) as self._sink,
            # A log file gets a line now and then; a terminal gets a progress bar.
            tqdm(
                total=self.total,
                unit="request",
                file=sys.stderr,
                mininterval=0.2 if sys.stderr.isatty() else 10,
                disable=not self.shows_progress,
            ) as self._bar,
        ):
            yield
        self.files.finish()

    def requests(self) -> Iterator[LineRequest]:
        """Yields the requests to answer, line by line: a file of long prompts is never in memory as a whole. Writes
        error records for lines that are not requests."""
        offset = 0
        with self.files.input.open("rb") as source:
            for number, line in enumerate(source, 1):
                if line.strip():
                    request_or_record = self.lines.read(number, line, offset)
                    if isinstance(request_or_record, LineRequest):
                        yield request_or_record
                    elif request_or_record is not None:
                        self.write(request_or_record)
                    else:
                        self.skipped += 1
                        self._bar.total = self.total - self.skipped  # for the bar's estimate of the time left
                offset += len(line)

    def write(self, record: dict[str, Any]) -> None:
        """Writes a line's record."""
        self._sink.write(record)
        response = record["response"]
        self.done += 1
        if response is None or response["status_code"] != 200:
            self.failed += 1
            self._note_reason(record)
        else:
            usage = response["body"]["usage"]
            self.tokens += usage["completion_tokens" if "completion_tokens" in usage else "output_tokens"]
        self._bar.set_postfix_str(f"{self.tokens / (monotonic() - self.start):.1f} tokens/s", refresh=False)
        self._bar.update()

    def _note_reason(self, record: dict[str, Any]) -> None:
        response = record["response"]
        wrong = record["error"] if response is None else response["body"]["error"]
        reason = escaped(wrong["message"])
        if reason not in self.reasons and len(self.reasons) >= MAX_REASONS:
            reason = OTHER_REASONS
        name = record["custom_id"]
        count, first = self.reasons.get(reason, (0, "" if name is None else f", {escaped(name)} first"))
        self.reasons[reason] = count + 1, first

    def why(self) -> Iterator[str]:
        """Yields a line per reason for failures: the number of failures, the custom_id of the first failure if it has
        one, and the reason."""
        for reason, (count, first) in self.reasons.items():
            yield f"{count} failed{first}: {reason}"

    def kept(self) -> str:
        """Returns the message for an interrupted run: the number of answers so far, and the file that holds them."""
        return self.files.kept(len(self.lines.answered) + self.done)


def run_files(files: BatchFiles, answer: Callable[[BatchRun], None]) -> int:
    """Answers the file with ``answer`` and prints a report; returns the exit code."""
    try:
        run = BatchRun(files)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        answer(run)
    except KeyboardInterrupt:
        print(f"interrupted: {run.kept()}", file=sys.stderr)
        return 130
    except SystemExit:  # SIGTERM
        print(f"terminated: {run.kept()}", file=sys.stderr)
        raise
    except (ApiError, BatchFailed, OSError) as error:
        print(f"error: {one_line(error)}; {run.kept()}", file=sys.stderr)
        return 1
    seconds = monotonic() - run.start
    if run.skipped:
        print(f"{counted(run.skipped, 'request')} answered before")
    requests, tokens = counted(run.done, "request"), counted(run.tokens, "token")
    print(f"{requests}, {run.failed} failed, {tokens} in {seconds:.1f} s -> {files.output}")
    for line in run.why():
        print(line, file=sys.stderr)
    return 0
