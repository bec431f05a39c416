"""The server's log: a record is one that nothing a client sends can make look like two, nor make long."""

from __future__ import annotations

import logging
from types import TracebackType

MAX_CHARS = 2000
"""Of a message, and of each line of a traceback: both may quote a request."""

MAX_LINES = 200
"""Of a traceback; of a longer one the middle is left out."""

INDENT = "    "


class LogFormatter(logging.Formatter):
    """Escapes and shortens messages; tracebacks keep their lines, none of which begins where a record does."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        lines = super().formatException(ei).splitlines()
        if len(lines) > MAX_LINES:
            half = MAX_LINES // 2
            lines = [*lines[:half], f"… {len(lines) - 2 * half} lines are left out …", *lines[-half:]]
        return "\n".join(INDENT + escaped(line) for line in lines)


def escaped(text: str) -> str:
    """``text`` on one line, without control characters, and shortened."""
    cut = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… ({len(text)} characters)"
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in cut)


def set_up_log() -> None:
    """Warnings and errors of every library go to stderr in this form, what the engine says of its start, and a line for
    each request; a log that is set up already is left alone."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(handlers=[handler])
    for name in ("shadowkv.engine", "shadowkv.serve.request_log"):
        logging.getLogger(name).setLevel(logging.INFO)
