"""Checks the values of a dataclass against the types of its fields. It is used for configs, sampling parameters and
settings of cache parts."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NUMBERS: dict[type, type] = {int: Integral, float: Real}
"""Abstract types of numbers. NumPy's numbers belong to them, too."""

_SHOWN = {types.NoneType: "None", Mapping: "dict", Sequence: "list"}
"""Names that messages use for types, where they differ from the type's ``__name__``."""

_IN_JSON: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    types.NoneType: "null",
    **dict.fromkeys((Mapping, dict), "an object"),
    **dict.fromkeys((Sequence, list), "an array"),
}
"""JSON's names of types."""


def wrong_types(values: DataclassInstance) -> list[str]:
    """Returns a message for each field whose value has a wrong type, such as ``max_model_len='8k' must be int or None,
    and is str``.

    Items of containers are not checked. A bool does not count as a number.
    """
    reasons = []
    for name, expected in _expected(type(values)).items():
        value = getattr(values, name)
        if type(value) not in expected and not any(_is(value, kind) for kind in expected):
            names = " or ".join(_SHOWN.get(kind, kind.__name__) for kind in expected)
            reasons.append(f"{name}={value!r:.100} must be {names}, and is {type(value).__name__}")
    return reasons


def wrong_json_types(kind: type[DataclassInstance], values: Mapping[str, Any]) -> list[str]:
    """Returns a message for each value of a JSON object whose type is wrong for the field of ``kind`` with its name,
    such as ``top_k="8" must be an integer, and is a string``. Otherwise as ``wrong_types``."""
    reasons = []
    for name, value in values.items():
        expected = _expected(kind)[name]
        if not any(_is(value, one) for one in expected):
            names = " or ".join(dict.fromkeys(_IN_JSON[one] for one in expected))
            reasons.append(f"{name}={as_json(value):.100} must be {names}, and is {json_type(value)}")
    return reasons


def json_type(value: Any) -> str:
    """JSON's name of a value's type, with its article. From Python, a value can have a type that JSON does not have."""
    return _IN_JSON.get(type(value), f"a {type(value).__name__}")


def as_json(value: Any) -> str:
    """Writes a value as JSON, for messages. From Python, it can have parts that JSON does not have. If the key of a
    dict is such a part, the value is written as in Python."""
    try:
        return json.dumps(value, default=repr)
    except TypeError:
        return repr(value)


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, _NUMBERS.get(kind, kind))


@cache
def _expected(kind: type[DataclassInstance]) -> dict[str, tuple[type, ...]]:
    hints = get_type_hints(kind)
    return {field.name: tuple(_alternatives(hints[field.name])) for field in fields(kind)}


def _alternatives(hint: Any) -> Iterator[type]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for alternative in get_args(hint):
            yield from _alternatives(alternative)
    else:
        yield origin or hint
