"""Whether a dataclass's values are of the types that its fields are annotated with: Python itself does not look."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NUMBERS: dict[type, type] = {int: Integral, float: Real}
"""What stands for a number, NumPy's included."""

_SHOWN = {types.NoneType: "None", Mapping: "dict"}
"""Types that messages call otherwise."""


def wrong_types(values: DataclassInstance) -> list[str]:
    """A reason for each field whose value is of another type: ``max_model_len='8k' must be int or None, and is str``.

    Of containers only the kind is looked at. A bool is no number.
    """
    reasons = []
    for field in fields(values):
        value, expected = getattr(values, field.name), _expected(type(values))[field.name]
        if not any(_is(value, kind) for kind in expected):
            names = " or ".join(_SHOWN.get(kind, kind.__name__) for kind in expected)
            reasons.append(f"{field.name}={value!r:.100} must be {names}, and is {type(value).__name__}")
    return reasons


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, _NUMBERS.get(kind, kind))


@cache
def _expected(kind: type) -> dict[str, tuple[type, ...]]:
    return {name: tuple(_alternatives(hint)) for name, hint in get_type_hints(kind).items()}


def _alternatives(hint: Any) -> Iterator[type]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for alternative in get_args(hint):
            yield from _alternatives(alternative)
    else:
        yield origin or hint
