"""Checks JSON schemas before compilation: size limits, estimated cost, and whether any JSON can satisfy them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from shadowkv.engine.request import RequestError, SchemaTimeout
from shadowkv.grammar_text import grammar_kind

ANY_JSON: dict[str, Any] = {}
"""The schema that any JSON value satisfies."""

MAX_SCHEMA_CHARS = 2**17
MAX_SCHEMA_DEPTH = 200
"""Compile time grows with the square of characters and depth: half a second at these limits, 15 seconds at 900 levels.
It cannot be interrupted. A chain of 20,000 references overflows the compiler's stack."""

MAX_SCHEMA_STATES = 8_000
"""Repetitions in patterns and strings are compiled state by state. Each state has a mask over the vocabulary, which
takes one or two milliseconds. A pattern of 60 characters can have millions of states."""

SMALL_CHARS, SMALL_STATES = 4_000, 50
MEDIUM_CHARS, MEDIUM_STATES = 8_000, 300

UNBOUNDED: dict[str, type | tuple[type, ...]] = {
    "pattern": str,
    "patternProperties": dict,
    "propertyNames": dict,
    "minProperties": (int, float),
    "maxProperties": (int, float),
}
"""Keys whose cost is not known before compilation, with the types of their values. A short regular expression can have
millions of ways to read one token of several letters; if tokens are bytes, it takes milliseconds. Counted properties
are compiled once for each count."""

LOG_PREFIX = re.compile(r"^.*(Check failed: (\(.*?\) is false: )?|\.(cc|h):\d+: )", re.DOTALL)
"""The prefix of the compiler's messages: time, source file and condition."""

Effort = Literal["small", "medium", "large"]
"""Estimated time of a compilation. ``small``: at most a second. ``medium``: a short schema that takes seconds, or
forever. ``large``: half a minute, or forever."""

LISTED_ITEMS = re.compile(r'"items"\s*:\s*\[')
DATA = ("const", "enum", "default", "examples")
"""Keys whose values are data, not schemas."""

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keys whose values are objects of schemas by name. A name can equal a key of JSON Schema."""

LONGEST_STRING = 1_000
"""Most states of a string with a length limit; longer limits have no more states."""

MAX_REASON_CHARS = 300
MAX_QUOTED_CHARS = 80

HUGE, DIGITS = 10**9, 9
"""A number above all limits, and its digits: larger numbers are cut off."""

TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|\{(?P<least>[0-9]+)(?:,(?P<most>[0-9]*))?\}|.", re.DOTALL)
"""A token of a regular expression: an escape, a set, a counted repetition, or any other character."""


@dataclass(frozen=True)
class SchemaCost:
    """The estimated cost of a schema before compilation.

    Attributes:
        chars: its length.
        states: about how many states its repetitions have.
        anything: whether any JSON value satisfies it.
        bounded: whether all of its cost is known.
    """

    chars: int
    states: int
    anything: bool
    bounded: bool

    @property
    def effort(self) -> Effort:
        """The estimated time of the compilation."""
        if self.chars > MEDIUM_CHARS or self.states > MEDIUM_STATES:
            return "large"
        is_small = self.bounded and self.chars <= SMALL_CHARS and self.states <= SMALL_STATES
        return "small" if is_small else "medium"


def refusal(reason: str, rules: str = "{}") -> RequestError:
    """The error for a schema or grammar ``rules`` that cannot be followed."""
    what, param = name_and_param(rules)
    return RequestError(f"the {what} cannot be followed: {reason[:MAX_REASON_CHARS]}", param)


def too_costly(reason: str, rules: str) -> SchemaTimeout:
    """The error for a schema or grammar that takes too much time or memory."""
    other = "a simpler one" if grammar_kind(rules) else "simpler patterns, or fewer properties to count"
    told = refusal(f"{reason}; use {other}", rules)
    return SchemaTimeout(str(told), told.param)


def not_compiled(reason: str, rules: str) -> SchemaTimeout:
    """The error for a schema or grammar that was not compiled for a reason of the server's."""
    what, param = name_and_param(rules)
    return SchemaTimeout(f"the {what} was not compiled: {reason}", param)


def not_followed(reason: str, rules: str) -> RequestError:
    """The error for an answer that cannot go on for a reason of the server's."""
    what, param = name_and_param(rules)
    return RequestError(f"the {what} is not followed any more: {reason}", param)


def name_and_param(rules: str) -> tuple[str, str]:
    """The name of a schema or grammar in error messages, and the request's parameter that holds it."""
    other = grammar_kind(rules)
    return ("JSON schema", "response_format") if other is None else (other[0].replace("_", " "), "structured_outputs")


def compiler_reason(error: Exception) -> str:
    """The compiler's reason for refusing a grammar."""
    return LOG_PREFIX.sub("", str(error)).strip() or "xgrammar gives no reason; simpler patterns may do"


def check_schema(schema: str) -> SchemaCost:
    """Checks a schema (as JSON text) or another grammar (``grammar_text``) and estimates its cost.

    Raises RequestError if it is too large or no JSON can satisfy it. For other grammars only the length is checked, and
    their cost is unknown, except for a choice of texts.
    """
    if (other := grammar_kind(schema)) is not None:
        if len(schema) > MAX_SCHEMA_CHARS:
            raise refusal(f"it has {len(schema)} characters, {MAX_SCHEMA_CHARS} are supported", schema)
        return SchemaCost(len(schema), 0, anything=False, bounded=other[0] == "choice")
    try:
        return _check(schema)
    except (ValueError, RecursionError) as error:
        raise refusal(str(error)) from error


@lru_cache(maxsize=64)
def _check(schema: str) -> SchemaCost:
    if len(schema) > MAX_SCHEMA_CHARS:
        raise ValueError(f"it has {len(schema)} characters, {MAX_SCHEMA_CHARS} are supported")
    rules = json.loads(schema)
    repeated: set[tuple[Any, ...]] = set()
    bounded = True
    level, depth = [rules], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        for one in level:
            if isinstance(one, dict):
                repeated |= _repeated(one)
                _check_reference(one.get("$ref"))
                bounded &= not any(isinstance(one.get(key), kind) for key, kind in UNBOUNDED.items())
        level = [child for one in level for child in _children(one)]
    states = sum(_states(*one) for one in repeated)
    if states > MAX_SCHEMA_STATES:
        raise ValueError(
            f"its patterns and string lengths need about {states} states, {MAX_SCHEMA_STATES} are supported; "
            "use fewer or shorter repetitions"
        )
    if not _has_answer(rules):
        raise ValueError("no finite JSON can satisfy it: it requires itself endlessly, or one of no alternatives")
    return SchemaCost(len(schema), states, bool(rules == ANY_JSON), bounded)


def _repeated(rules: dict[str, Any]) -> set[tuple[Any, ...]]:
    """The patterns and string lengths of a schema object, which are compiled state by state. Equal ones in a document
    are compiled once."""
    lengths = tuple(n for key in ("minLength", "maxLength") if isinstance(n := rules.get(key), int | float))
    patterns = rules.get("patternProperties")
    names = [*patterns] if isinstance(patterns, dict) else []
    found = {(pattern, ()) for pattern in (rules.get("pattern"), *names) if isinstance(pattern, str)}
    return found | ({("", lengths)} if lengths else set())


def _states(pattern: str, lengths: tuple[float, ...]) -> int:
    return unrolled(pattern) if pattern else int(min(max(lengths), LONGEST_STRING))


def unrolled(pattern: str) -> int:
    """Length of a regular expression with its counted repetitions expanded; at most ``HUGE``."""
    sizes, last, at = [0], 0, 0
    while at < len(pattern):
        token = TOKEN.match(pattern, at)
        assert token is not None  # any character is one
        at = token.end()
        least, most = token.group("least"), token.group("most")
        if token.group() == "(":
            sizes.append(0)
            last = 0
            continue
        if least is not None:
            times = max(int(number[:DIGITS]) for number in (least, most or "0"))
            sizes[-1] += last * max(0, times - 1)
        elif token.group() == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif token.group() not in ("|", "*", "+", "?"):
            last = 1
            sizes[-1] += 1
        sizes[-1] = min(sizes[-1], HUGE)
    return min(sum(sizes), HUGE)


def with_prefix_items(schema: str) -> str:
    """A schema (as JSON text) with lists of ``items`` renamed to ``prefixItems``, which the compiler knows. Drafts of
    JSON Schema before 2020-12 have lists of ``items``."""
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
    """The parts that ``one`` depends on, and how many of them must have an answer for ``one`` to have one. 0 if that
    cannot be determined."""
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
    """The schema that ``#/path`` points at; True (any JSON) if it is not found, because the compiler refuses it
    later."""
    for name in reference[1:].split("/")[1:]:
        if not isinstance(rules, dict) or name not in rules:
            return True
        rules = rules[name]
    return rules
