"""The log of every process of a server: lines that nothing a client sends can forge."""

from __future__ import annotations

import logging
from types import TracebackType

MAX_CHARS = 2000
"""Limit for a message, and for each line of a traceback: both may quote a request."""

MAX_LINES = 200
"""Limit for a traceback; the middle of a longer one is left out."""

INDENT = "    "


class LogFormatter(logging.Formatter):
    """Escapes and shortens messages, so that nothing that a client sends makes a record look like two, or long;
    tracebacks keep their lines, none of which begins like a record."""

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
    """``text`` on one line, shortened and without control characters."""
    cut = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… ({len(text)} characters)"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def set_up_log() -> None:
    """Sends to stderr, in this format, warnings and errors of every library, the engine's messages about its start, and
    a line for each request; a log that is already set up is left alone."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(handlers=[handler])
    for name in ("shadowkv.engine", "shadowkv.serve.request_log"):
        logging.getLogger(name).setLevel(logging.INFO)
