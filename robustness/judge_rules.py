"""Rules that ``judge.py`` is built from: what a value, list or object has to be, and which fields have no effect."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

Rule = Callable[[Any], bool]


def boolean(value: Any) -> bool:
    return isinstance(value, bool)


def text(value: Any) -> bool:
    return isinstance(value, str)


def utf8(value: Any) -> bool:
    """A text without half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def integer(low: float = -math.inf, high: float = math.inf) -> Rule:
    return lambda value: type(value) is int and low <= value <= high


def number(low: float, high: float, above: float = -math.inf) -> Rule:
    return lambda value: type(value) in (int, float) and low <= value <= high and value > above


def some(rule: Rule, least: int = 0, most: float = math.inf) -> Rule:
    """A list of ``least`` to ``most`` items."""
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(rule, value))


def short(most: int, least: int = 0) -> Rule:
    """A text of ``least`` to ``most`` characters."""
    return lambda value: isinstance(value, str) and least <= len(value) <= most


def save_name(value: Any) -> bool:
    """A name to save as."""
    allowed = {*"._-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    return isinstance(value, str) and 1 <= len(value) <= 64 and {*value} <= allowed


def snapshot_name(value: Any) -> bool:
    """A snapshot's name."""
    return isinstance(value, str) and len(value) == 40 and {*value} <= {*"0123456789abcdef"}


def either(*rules: Rule) -> Rule:
    return lambda value: any(rule(value) for rule in rules)


def fields(rules: dict[str, Rule], *required: str) -> Rule:
    """An object whose fields follow the rules; null is the same as omitted."""

    def check(value: Any) -> bool:
        if not isinstance(value, dict) or any(value.get(name) is None for name in required):
            return False
        return all(harmless(*item) if item[0] not in rules else rules[item[0]](item[1]) for item in given(value))

    return check


def given(value: dict[str, Any]) -> list[tuple[str, Any]]:
    return [item for item in value.items() if item[1] is not None]


def harmless(name: str, value: Any) -> bool:
    """Whether an unsupported parameter has no effect: an unknown one is a hint for other servers."""
    neutral = [value == other and type(value) is type(other) for other in NEUTRAL.get(name, ())]
    return name in WITHOUT_EFFECT or any(neutral) or (name not in NEUTRAL and name not in WITH_EFFECT)


# Deliberately not those of shadowkv/serve/bodies/parameters.py: a list that is wrong there must differ from this one.
WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    + ("prediction", "include_obfuscation")
)
WITH_EFFECT = frozenset(
    ("grammar", "structured_outputs", "guided_json", "bad_words", "audio", "web_search_options", "mcp_servers")
    + ("truncate_prompt_tokens", "logits_processors", "previous_response_id", "conversation", "max_tokens")
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "background": (False,),
    "n": (1,),
    "best_of": (1,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "tool_calls": ([],),
    "annotations": ([],),
}


def schema(value: Any) -> bool:
    types = {"string", "number", "integer", "boolean", "array", "object", "null"}
    known = either(lambda kind: text(kind) and kind in types, some(lambda kind: text(kind) and kind in types))
    return isinstance(value, dict) and ("type" not in value or known(value["type"]))


def response_format(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        return False
    named = value.get("json_schema")
    return value["type"] != "json_schema" or (isinstance(named, dict) and schema(named.get("schema")))


def json_object(value: Any) -> bool:
    """JSON text of an object; an empty text counts as one without arguments."""
    try:
        return not value.strip() or isinstance(loads(value.encode()), dict)
    except (AttributeError, ValueError, RecursionError):
        return False


def tool_choice(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("none", "auto", "required")
    return isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict)


function = fields({"name": short(256, least=1), "description": utf8, "parameters": schema, "strict": boolean}, "name")
tool = fields({"type": lambda kind: kind == "function", "function": function}, "type", "function")
tool_call = fields(
    {
        "id": short(256),
        "type": lambda kind: kind == "function",
        "function": fields({"name": short(256), "arguments": json_object}, "name", "arguments"),
    },
    "id",
    "function",
)


def loads(raw: bytes) -> Any:
    """JSON, without the NaN and Infinity that Python accepts."""
    return json.loads(raw, parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
