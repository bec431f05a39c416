"""The log format of all processes of a server. Text from clients cannot forge log records."""

from __future__ import annotations

import logging
from types import TracebackType

MAX_CHARS = 2000
"""Maximum number of characters of a message, and of each line of a traceback. Both can quote a request."""

MAX_LINES = 200
"""Maximum number of lines of a traceback. The middle of a longer traceback is left out."""

INDENT = "    "


class LogFormatter(logging.Formatter):
    """Escapes and shortens messages, so that text from a client cannot make a record very long, or make it look like
    two records. Tracebacks keep their line breaks. Their lines are indented, so that no line looks like a record."""

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
    """Returns ``text`` as one line of at most about ``MAX_CHARS`` characters, with escapes for control characters."""
    cut = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… ({len(text)} characters)"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def set_up_log() -> None:
    """Sets up logging to stderr in this format, unless logging is set up already. The log has warnings and errors of
    all libraries, the engine's messages about its start, and a line for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(handlers=[handler])
    for name in ("shadowkv.engine", "shadowkv.serve.request_log"):
        logging.getLogger(name).setLevel(logging.INFO)
