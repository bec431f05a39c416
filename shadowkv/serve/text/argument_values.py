"""Arguments that models write as plain text, without JSON's quotes: a function's schema says what they are."""

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
"""JSON schema's names of what values are."""

ANYTHING = frozenset(KINDS.values())
STRING = frozenset(("string",))
OPTIONAL_STRING = frozenset(("string", "null"))

WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""In any case: templates show models Python's words as well."""

ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
"""What reading a text can end with."""


class ValueWriter:
    """JSON of one value, as its text arrives: a string's at once, other values' when they are complete.

    Args:
        types: JSON types that it may have. A text that is none of the others is a string, even if that is not one of
            them: nothing that a model wrote is lost.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types, self._held = types, ""
        self._is_string = types <= STRING
        self._is_open = False

    def add(self, text: str) -> str:
        """JSON that more text makes certain."""
        self._held += text
        if self._types == OPTIONAL_STRING and len(self._held.strip()) > max(map(len, WORDS)):
            self._is_string = True
        if not self._is_string:
            return ""
        opening = "" if self._is_open else '"'
        self._is_open, held, self._held = True, self._held, ""
        return opening + json.dumps(held, ensure_ascii=False)[1:-1]

    def end(self) -> str:
        """The rest of the JSON."""
        return f'{self.add("")}"' if self._is_string else json_value(self._held, self._types)


def json_value(text: str, types: frozenset[str]) -> str:
    """JSON of a text as a value of one of ``types``: as it was written if it is one in JSON, and translated if it is a
    word or a dictionary or list of Python's. As in vLLM null is taken for any type but a string, and what is none of
    ``types`` is a string."""
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
    """The arguments that a function's ``parameters`` (a JSON schema) name, with the schema of each."""
    named = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return named if isinstance(named, Mapping) else {}


def argument_types(parameters: Any, name: str) -> frozenset[str]:
    """JSON types that a function's ``parameters`` (a JSON schema) allow for one of them; none where they do not say."""
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
        warnings.simplefilter("ignore")  # about escapes in its strings
        return ast.literal_eval(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _referred(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference within it (``#/$defs/…``) means; None for others."""
    root, *steps = reference.split("/")
    part = schema if root == "#" else None
    for step in steps:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
