"""Checks of JSON schemas before compilation, and the errors of schemas and grammars that cannot be followed."""

from __future__ import annotations

import json
import re
from typing import Any

from shadowkv.engine.request import RequestError, SchemaTimeout
from shadowkv.grammar_text import grammar_kind

MAX_GRAMMAR_CHARS = 2**17
"""Maximum number of characters of a schema or another grammar. A chain of 20,000 references overflows the compiler's
stack."""

LOG_PREFIX = re.compile(r"^.*(Check failed: (\(.*?\) is false: )?|\.(cc|h):\d+: )", re.DOTALL)
"""The prefix of the compiler's messages: time, source file and condition."""

LISTED_ITEMS = re.compile(r'"items"\s*:\s*\[')
DATA = ("const", "enum", "default", "examples")
"""Keys whose values are data, not schemas."""

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keys whose values are objects of schemas by name. A name can equal a key of JSON Schema."""

MAX_REASON_CHARS = 300
MAX_QUOTED_CHARS = 80


def refusal(reason: str, rules: str = "{}") -> RequestError:
    """The error for a schema or grammar ``rules`` that cannot be followed."""
    what, param = name_and_param(rules)
    return RequestError(f"the {what} cannot be followed: {reason[:MAX_REASON_CHARS]}", param)


def too_costly(reason: str, rules: str) -> SchemaTimeout:
    """The error for a schema or grammar that takes too much time or memory."""
    other = "a simpler one" if grammar_kind(rules) else "simpler patterns, or fewer properties to count"
    error = refusal(f"{reason}; use {other}", rules)
    return SchemaTimeout(str(error), error.param)


def not_compiled(reason: str, rules: str) -> SchemaTimeout:
    """The error for a schema or grammar that was not compiled because of a problem of the server."""
    what, param = name_and_param(rules)
    return SchemaTimeout(f"the {what} was not compiled: {reason}", param)


def not_followed(reason: str, rules: str) -> RequestError:
    """The error for an answer that cannot go on because of a problem of the server."""
    what, param = name_and_param(rules)
    return RequestError(f"the {what} is not followed any more: {reason}", param)


def name_and_param(rules: str) -> tuple[str, str]:
    """Returns the name of a schema or grammar in error messages, and the request parameter that it came from."""
    other = grammar_kind(rules)
    return ("JSON schema", "response_format") if other is None else (other[0].replace("_", " "), "structured_outputs")


def compiler_reason(error: Exception) -> str:
    """Extracts the compiler's reason from its error."""
    return LOG_PREFIX.sub("", str(error)).strip() or "xgrammar gives no reason; simpler patterns may work"


def parse_schema(schema: str) -> Any:
    """Parses a schema. Raises ValueError or RecursionError if the schema is not JSON, if it refers to other documents,
    or if no JSON can satisfy it."""
    rules = json.loads(schema)
    level = [rules]
    while level:
        for one in level:
            if isinstance(one, dict):
                _check_reference(one.get("$ref"))
        level = [child for one in level for child in _children(one)]
    if not _has_answer(rules):
        raise ValueError("no finite JSON can satisfy it: a part requires itself, or has no alternatives")
    return rules


def with_prefix_items(schema: str) -> str:
    """Renames lists of ``items`` in a schema (JSON text) to ``prefixItems``, which the compiler knows. Drafts of JSON
    Schema before 2020-12 have lists of ``items``."""
    return json.dumps(_with_prefix_items(json.loads(schema))) if LISTED_ITEMS.search(schema) else schema


def _with_prefix_items(rules: Any) -> Any:
    if isinstance(rules, list):
        return [*map(_with_prefix_items, rules)]
    if not isinstance(rules, dict):
        return rules
    parts = {}
    for key, value in rules.items():
        if key in NAMED and isinstance(value, dict):
            parts[key] = {name: _with_prefix_items(schema) for name, schema in value.items()}
        else:
            parts[key] = value if key in DATA else _with_prefix_items(value)
    if isinstance(parts.get("items"), list):
        parts["prefixItems"] = parts.pop("items")
        if "additionalItems" in parts:
            parts["items"] = parts.pop("additionalItems")
    return parts


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _check_reference(reference: Any) -> None:
    # The compiler would accept any reference.
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"$ref {reference[:MAX_QUOTED_CHARS]!r} must be '#' or begin with '#/'")


def _has_answer(rules: Any) -> bool:
    """Whether some finite JSON satisfies the schema ``rules``.

    Each part is visited once. When a part has an answer, the parts that need it are updated, so the order and number of
    references do not matter.
    """
    missing: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}
    left, answered = [rules], []
    while left:
        one = left.pop()
        if id(one) in missing:
            continue
        missing[id(one)], parts = _needs(rules, one)
        if not missing[id(one)]:
            answered.append(id(one))
        for part in parts:
            waiting.setdefault(id(part), []).append(id(one))
        left += parts
    while answered:
        for one in waiting.pop(answered.pop(), []):
            missing[one] -= 1
            if not missing[one]:
                answered.append(one)
    return missing[id(rules)] <= 0


def _needs(rules: Any, one: Any) -> tuple[int, list[Any]]:
    """Returns the number of parts that must have an answer for ``one`` to have one, and the parts. The number is 0 if
    it cannot be determined; ``one`` then counts as having an answer."""
    if not isinstance(one, dict):
        return int(one is False), []
    if "$ref" in one:
        return (1, [_resolve(rules, one["$ref"])]) if isinstance(one["$ref"], str) else (0, [])
    if "const" in one or "enum" in one:
        return 0, []
    for key in ("anyOf", "oneOf"):
        if isinstance(one.get(key), list):
            return 1, one[key]
    kind, properties, required = (one.get(key) for key in ("type", "properties", "required"))
    if kind in ("object", None) and isinstance(properties, dict) and isinstance(required, list):
        names = {name for name in required if isinstance(name, str)}
        parts = [properties[name] for name in properties if name in names]
        return len(parts), parts
    if kind == "array" and one.get("minItems") and "prefixItems" not in one:
        return 1, [one.get("items", True)]
    return 0, []


def _resolve(rules: Any, reference: str) -> Any:
    """Returns the schema that ``#/path`` points at. Returns True (any JSON) if there is none: the compiler refuses the
    reference later."""
    for name in reference[1:].split("/")[1:]:
        if not isinstance(rules, dict) or name not in rules:
            return True
        rules = rules[name]
    return rules
