"""Writes dataclasses as JSON and reads them back. Reading is strict: every text that is not valid raises ValueError."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

Value = TypeVar("Value")

MAX_BYTES = 2**20
"""Size of the longest text that is parsed."""


def to_json(value: Any) -> str:
    """Returns the JSON of a dataclass whose fields are numbers, strings, booleans, tuples, or dataclasses of these."""
    return json.dumps(asdict(value), separators=(",", ":"))


def from_json(kind: type[Value], text: str | bytes) -> Value:
    """Reads a ``kind`` from the JSON that ``to_json`` makes. Raises ValueError, which says what is wrong."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"the text has {len(text)} bytes, more than {MAX_BYTES}")
    try:
        return from_plain(kind, json.loads(text, object_pairs_hook=_once))
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None


def from_plain(kind: type[Value], plain: object) -> Value:
    """Reads a ``kind`` from a value of parsed JSON, or from what ``dataclasses.asdict`` returns. Raises ValueError,
    which says what is wrong."""
    try:
        return cast(Value, _read(kind, plain, kind.__name__))
    except RecursionError:
        raise ValueError(f"the {kind.__name__} is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_key = dict(pairs)
    if len(by_key) < len(pairs):
        raise ValueError(f"a key occurs twice in {_shown([key for key, _ in pairs])}")
    return by_key


def _read(kind: Any, plain: Any, name: str) -> Any:
    """Converts ``plain``, a value of parsed JSON, to a ``kind``. ``name`` is the value's place in the text, for
    errors."""
    if is_dataclass(kind):
        return _read_object(kind, plain, name)
    if get_origin(kind) is tuple:
        if not isinstance(plain, list | tuple):
            raise ValueError(f"{name} is {_shown(plain)}, not a list")
        return tuple(_read(get_args(kind)[0], item, f"{name}[{number}]") for number, item in enumerate(plain))
    if type(plain) is not kind:  # not isinstance, which takes a bool for an int
        raise ValueError(f"{name} is {_shown(plain)}, not of type {kind.__name__}")
    return plain


def _read_object(kind: Any, plain: Any, name: str) -> Any:
    names = [field.name for field in fields(kind)]
    if not isinstance(plain, dict) or set(plain) != set(names):
        raise ValueError(f"{name} is {_shown(plain)}, not an object with exactly {', '.join(names)}")
    kinds = get_type_hints(kind)
    return kind(**{field: _read(kinds[field], value, f"{name}.{field}") for field, value in plain.items()})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
