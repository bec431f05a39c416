"""Converts arguments of tool calls to JSON, for models that write them as plain text without JSON's quotes. The
function's schema tells the types of the arguments."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
"""JSON Schema's name of each Python type."""

ANYTHING = frozenset(KINDS.values())
STRING = frozenset(("string",))
OPTIONAL_STRING = frozenset(("string", "null"))

WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""Maps a word in lower case to the JSON value that it stands for in any case. Python's words (True, None) are included
because chat templates show them to models."""

ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
"""Exceptions that parsing a text as a value can raise."""


class ValueWriter:
    """Writes the JSON of one value while its text arrives: strings piece by piece, other values when they are complete.

    Args:
        types: JSON types that the value may have. A text of none of these types is written as a string, even if strings
            are not allowed, so that nothing that the model wrote is lost.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types, self._held = types, ""
        self._is_string = types <= STRING
        self._is_open = False

    def add(self, text: str) -> str:
        """Takes more of the value's text. Returns the further JSON that is certain by now."""
        self._held += text
        if self._types == OPTIONAL_STRING and len(self._held.strip()) > max(map(len, WORDS)):
            self._is_string = True
        if not self._is_string:
            return ""
        opening = "" if self._is_open else '"'
        self._is_open, held, self._held = True, self._held, ""
        return opening + json.dumps(held, ensure_ascii=False)[1:-1]

    def end(self) -> str:
        """Ends the value. Returns the rest of its JSON."""
        return f'{self.add("")}"' if self._is_string else json_value(self._held, self._types)


def json_value(text: str, types: frozenset[str]) -> str:
    """Converts a text to the JSON of a value of one of ``types``. Valid JSON is kept. ``WORDS``, and dictionaries and
    lists in Python's syntax, are translated. As in vLLM, null is accepted for any type but a string, and a text of none
    of the ``types`` becomes a string."""
    core = text.strip()
    word = WORDS.get(core.lower())
    if word is not None and _is_of(json.loads(word), types):
        return word
    try:
        if _is_of(json.loads(core, parse_constant=_refuse), types):
            return core
    except ERRORS:
        pass
    try:
        if core.startswith(("{", "[")) and _is_of(value := _python_value(core), types):
            return json.dumps(value, allow_nan=False)
    except ERRORS:
        pass
    return json.dumps(text, ensure_ascii=False)


def properties(parameters: Any) -> Mapping[str, Any]:
    """Returns the schema of each argument by its name, from a function's ``parameters`` (a JSON schema)."""
    named = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return named if isinstance(named, Mapping) else {}


def argument_types(parameters: Any, name: str) -> frozenset[str]:
    """Returns the JSON types that a function's ``parameters`` (a JSON schema) allow for the argument ``name``. The set
    is empty if the schema names no types."""
    types, seen = set[str](), set[str]()
    parts: list[Any] = [properties(parameters).get(name)]
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        named, reference = part.get("type"), part.get("$ref")
        values = [part["const"]] if "const" in part else part.get("enum")
        if named is not None:
            types.update(kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
        elif isinstance(values, list):
            types.update(KINDS[type(value)] for value in values)
        elif isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            parts.append(_referred(parameters, reference))
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(several := part.get(word), list):
                parts += several
    return frozenset(types) & ANYTHING


def _is_of(value: Any, types: frozenset[str]) -> bool:
    kind = KINDS.get(type(value))
    if kind == "null":
        return "null" in types or "string" not in types
    if kind == "integer" or (isinstance(value, float) and value.is_integer()):
        return bool(types & {"integer", "number"})
    return kind != "string" and kind in types


def _python_value(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about invalid escapes in strings
        return ast.literal_eval(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _referred(schema: Any, reference: str) -> Any:
    """Returns the part of a schema that an internal reference (``#/$defs/…``) points to; None for other references."""
    root, *steps = reference.split("/")
    part = schema if root == "#" else None
    for step in steps:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
