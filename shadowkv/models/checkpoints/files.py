"""Reads a model's files, which may be corrupt or malicious: sizes are limited, and errors are one line with the file's
name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shadowkv.field_types import json_type

MAX_JSON_BYTES = 1 << 26
"""Maximum size of a JSON file. The largest real ones, tokenizer.json with 262,144 tokens and their merges, have 33
MB."""

AGAIN = "fetch it again, or use another copy of the model"
OTHER_MODEL = "use another model"
ALIKE = 0.65
"""A known name is suggested for an unknown one if their similarity, as ``difflib`` measures it, is at least this."""
MAX_REASONS, MAX_REASON_CHARACTERS = 8, 1000


class ModelFileError(ValueError):
    """A model's file cannot be used; the message is one line.

    Args:
        file: the file.
        reason: what is wrong; it can quote the file's content.
        remedy: what to do about it.
    """

    def __init__(self, file: Path, reason: str, remedy: str = AGAIN) -> None:
        super().__init__(f"{file}: {_one_line(reason)}; {remedy}")


def _one_line(text: str) -> str:
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return text if len(text) <= MAX_REASON_CHARACTERS else f"{text[:MAX_REASON_CHARACTERS]}…"


def join_reasons(reasons: Sequence[str]) -> str:
    """Reasons in one line, shortened to the first ones if there are many."""
    more = [f"and {len(reasons) - MAX_REASONS} more"] if len(reasons) > MAX_REASONS else []
    return "; ".join([*reasons[:MAX_REASONS], *more])


def unsupported(what: str, name: str, known: Iterable[str]) -> str:
    """Returns the reason why ``name`` cannot be used, with a list of the ``known`` names. If a known name is similar to
    ``name``, the reason suggests it first."""
    known = list(known)
    near = next(iter(get_close_matches(name, known, 1, ALIKE)), None)
    nearest = f"nearest: {near}; " if near else ""
    return f"{what} {name[:60]!r} is not supported; {nearest}supported: {', '.join(known)}"


@contextmanager
def naming(file: Path, remedy: str = AGAIN) -> Iterator[None]:
    """A context that turns ValueErrors about a file's content into ModelFileErrors, which name the file."""
    try:
        yield
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(file, str(error), remedy) from error


def is_there(file: Path) -> bool:
    """Whether the folder has an entry of this name. A broken link counts; reading it raises an error."""
    return os.path.lexists(file)


def check_regular(file: Path) -> None:
    """Raises ModelFileError for directories, broken links, and special files whose reading might never end."""
    if file.is_file():
        return
    if file.is_dir():
        raise ModelFileError(file, "this is a directory, not a file")
    if file.is_symlink():
        raise ModelFileError(file, f"this link leads to no file: {os.readlink(file)}")
    raise ModelFileError(file, "this is not a regular file")


def read_text(file: Path) -> str:
    """Content of a UTF-8 file of at most ``MAX_JSON_BYTES``; raises ModelFileError, or OSError if it cannot be read."""
    check_regular(file)
    with file.open("rb") as opened:
        raw = opened.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise ModelFileError(file, f"it has more than {MAX_JSON_BYTES >> 20} MiB, which is too much for such a file")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(file, f"byte {error.start} is not UTF-8") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises what ``read_text`` raises, and ModelFileError, with the line, for invalid
    JSON."""
    text = read_text(file)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelFileError(file, f"line {error.lineno} column {error.colno} is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ModelFileError(file, "it is nested too deeply") from error
    except ValueError as error:
        raise ModelFileError(file, "a number has too many digits") from error
    if not isinstance(value, dict):
        raise ModelFileError(file, f"it holds {json_type(value)}, not an object")
    return value


def is_number(value: Any, above: float = -math.inf, most: float = 1e300) -> bool:
    """Whether ``value`` is a number in the range (``above``, ``most``], and not NaN; integers can have any number of
    digits."""
    return type(value) in (int, float) and above < value <= most
