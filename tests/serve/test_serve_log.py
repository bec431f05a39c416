"""The log: what a client sends makes no record look like another, nor long."""

from __future__ import annotations

import io
import logging
import re

import pytest

from shadowkv.log_format import MAX_CHARS, MAX_LINES, LogFormatter
from shadowkv.serve.http.errors import as_api_error

FORGED = "2026-01-01 00:00:00,000 ERROR forged: all is lost"
HEAD = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (WARNING|ERROR) shadowkv\.")


@pytest.fixture
def log():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter())
    logger = logging.getLogger("shadowkv")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def failure(text: str) -> Exception:
    try:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise RuntimeError(text) from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x85", "\u2028"])
def test_a_line_that_a_client_sends_is_no_record(log, end):
    as_api_error(failure(f"a{end}{FORGED}{end}\x1b[2Jb"))
    logging.getLogger("shadowkv.test").warning("from a client: %s", f"a{end}{FORGED}")
    lines = log.getvalue().splitlines()
    assert [bool(HEAD.match(line)) for line in lines] == [True, *[False] * (len(lines) - 2), True]
    assert not [line for line in lines if line.startswith("2026-01-01")]
    assert all(line.isprintable() for line in lines)
    # What helps is there: where it was, and what was before.
    assert "in failure" in log.getvalue() and "direct cause" in log.getvalue()


def test_a_long_text_is_cut(log):
    as_api_error(failure("x" * 10**6))
    as_api_error(failure("x\n" * 10**6))
    logging.getLogger("shadowkv.test").warning("x" * 10**6)
    lines = log.getvalue().splitlines()
    assert len(lines) < 2 * MAX_LINES and max(map(len, lines)) < MAX_CHARS + 200
    assert "(1000000 characters)" in lines[-1] and "lines are left out" in log.getvalue()
