"""Bodies for the fuzzer that are right, nearly right, and garbage.

They are made from the server's own OpenAPI schema, then changed: types swapped, numbers pushed to their bounds, keys
dropped, added, doubled, trees nested too deep, texts cut, bytes flipped, the wrong content type. Each one depends only
on the seed and its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from robustness.judge_rules import NEUTRAL, WITH_EFFECT, WITHOUT_EFFECT

MODEL = "tiny"
"""The model's name on the server."""

OPTIONAL = 0.15
"""Probability that a body has an optional parameter."""
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    {"enum": ["x", 1, None]},
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    {"anyOf": [{"type": "null"}, {"allOf": [{"type": "string", "minLength": 1, "maxLength": 3}]}, {"const": 1.5}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}}},
    {"$ref": "#"},
    {},
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALL_ITEM = {"call_id": "c1", "name": "f", "arguments": "{}"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMAS[0]}}
TYPICAL: dict[str, tuple[Any, ...]] = {
    "model": (MODEL,),
    "n": (1, 2, 3),
    "best_of": (1, 2),
    "max_tokens": (1, 2, 5),
    "max_completion_tokens": (1, 2, 5),
    "min_tokens": (0, 1),
    "temperature": (0, 0.7, 2),
    "top_p": (0.1, 1),
    "top_k": (-1, 0, 5),
    "min_p": (0, 0.1),
    "repetition_penalty": (1, 1.2),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (2, 0),
    "logit_bias": ({"65": 5, "3": -100}, {}),
    "stop": ("a", ["x", "yz"]),
    "stop_token_ids": ([5], []),
    "seed": (0, -1, 2**63 - 1),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        *({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in SCHEMAS),
    ),
    "prompt": ("abc", "Hello, ", ["a", "b"], [1, 2, 3], [[1, 2], [3]], "x" * 520),
    "messages": (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "What is it?"}]}],
        [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2", "tool_call_id": "c1"}],
    ),
    "tools": (
        *([TOOL], [{"type": "function", "function": {"name": "g"}}, TOOL]),
        *([{"type": "function", **TOOL["function"]}], [{"name": "f", "input_schema": SCHEMAS[0]}]),
    ),
    "input": ("Hi", [{"role": "user", "content": "Hi"}], [{"type": "function_call", **CALL_ITEM}], {"a": 1}),
    "max_output_tokens": (1, 2, 5),
    "reasoning": ({"effort": "low"},),
    "tool_choice": ("none", "auto", "required", {"type": "function", "function": {"name": "f"}}),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
    "arguments": ('{"a": 1}', "{}"),
    "parameters": (SCHEMAS[0],),
    "content": ("Hi", "What is it?", [{"type": "text", "text": "Hi"}], ""),
    "top_logprobs": (0, 2),
    "tokens": ([], [72, 105]),
    "name": ("a", "b.C-1_"),
}
"""What the schema does not say: meaningful values of its parameters."""

LONG_ENOUGH: tuple[Any, ...] = ("x" * 80, [5] * 100)
"""Prompts that can be saved."""

JUNK: tuple[Any, ...] = (
    *(None, True, False, "", "x", "0", "1e5", "null", [], {}, [[]], [None], {"": None}, {"a": {"b": [1]}}),
    *(0, -1, 1, 2, 127, 128, 129, 2**31, 2**32, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("\ud800", "\udfff\ud800", "\0", "é", "日本語", "💥" * 40, "\u202e", "a" * 10_000, "../../etc/passwd", "{{7*7}}"),
    *([0] * 5_000, ["a"] * 500, {str(i): i for i in range(300)}, [[[[[[[[[]]]]]]]]], {"type": "text"}, [-1], [1.0]),
)
EXTRA_NAMES = (
    *NEUTRAL,
    *sorted(WITHOUT_EFFECT),
    *sorted(WITH_EFFECT),
    "no_such_parameter",
    "",
    "\0",
    "\ud800",
    "__proto__",
    "self",
    "cls",
    "💥",
)
TYPES = (
    *(None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"),
    *("application/json; charset=utf-16", "application/problem+json", "APPLICATION/JSON", "application/jsonx", "\x00"),
)


@dataclass(frozen=True)
class Case:
    """One request."""

    path: str
    content_type: str | None
    raw: bytes


class Cases:
    """Makes requests for every route that takes a body.

    Args:
        openapi: the application's schema.
        seed: everything that a case depends on, together with its number.
    """

    def __init__(self, openapi: dict[str, Any], seed: int) -> None:
        self._named, self._seed = openapi["components"]["schemas"], seed
        posts = [(path, routes["post"]) for path, routes in openapi["paths"].items() if "post" in routes]
        contents = {path: post["requestBody"]["content"] for path, post in posts if "requestBody" in post}
        self.bodies = {path: one["application/json"] for path, one in contents.items() if "application/json" in one}

    def make(self, number: int) -> Case:
        """The case with that number."""
        self._random = rng = random.Random(f"{self._seed} {number}")
        path, content = rng.choice([*self.bodies.items()])
        tree = self._valid(content["schema"])
        if path == "/cache/save" and "messages" not in tree and rng.random() < 0.5:
            tree["prompt"] = rng.choice(LONG_ENOUGH)
        for _ in range(rng.choice((0, 0, 0, 1, 1, 1, 2, 3))):
            tree = self._changed(tree)
        dumped = json.dumps(tree, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
        raw = dumped.encode("utf-8", "surrogatepass")
        if rng.random() < 0.15:
            raw = self._garbled(raw)
        return Case(path, rng.choice(TYPES) if rng.random() < 0.04 else "application/json", raw)

    # -- bodies ----------------------------------------------------------------------------------------------------

    def _valid(self, schema: dict[str, Any], name: str = "") -> Any:
        """A value that follows the schema, though not always all of the server's requirements."""
        rng = self._random
        if name in TYPICAL and rng.random() < 0.8:
            return rng.choice(TYPICAL[name])
        if "$ref" in schema:
            return self._valid(self._named[schema["$ref"].rsplit("/", 1)[1]], name)
        if branches := schema.get("anyOf", schema.get("oneOf")):
            return self._valid(rng.choice(branches), name)
        if "const" in schema or "enum" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            wanted = schema.get("required", ())
            chosen = [item for item in schema["properties"].items() if item[0] in wanted or rng.random() < OPTIONAL]
            return {key: self._valid(value, key) for key, value in chosen}
        if kind == "array":
            return [self._valid(schema["items"]) for _ in range(rng.randrange(schema.get("minItems", 0), 4))]
        return rng.choice(
            {
                "string": ("a", "some text", "naïve", "\n"),
                "integer": (0, 1, 3, 20),
                "number": (0, 0.5, 1),
                "boolean": (True, False),
                "object": ({}, {"5": 1}),
            }.get(str(kind), (None,))
        )

    def _changed(self, tree: Any) -> Any:
        """``tree`` with one change at a random place."""
        rng = self._random
        tree = json.loads(json.dumps(tree))  # typical values are shared
        places = list(_places(tree))
        if not places or rng.random() < 0.02:
            return rng.choice(JUNK)
        parent, key = rng.choice(places)
        value, kind = parent[key], rng.randrange(8)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(EXTRA_NAMES)] = rng.choice([*JUNK, *NEUTRAL.values()])
        elif kind == 2:
            parent[key] = [value] * rng.choice((1, 2, 200))
        elif kind == 3:
            other, place = rng.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                parent[key], other[place] = other[place], json.loads(json.dumps(value))
        elif type(value) in (int, float) and abs(value) < 2**64 and kind < 6:
            sign = rng.choice((1, -1))
            near = value + sign, value + sign * 1e-9, -value, float(value), str(value)
            parent[key] = rng.choice((*near, sign * 2 ** rng.randrange(70)))
        else:
            parent[key] = rng.choice(JUNK)
        return tree

    def _garbled(self, raw: bytes) -> bytes:
        """``raw`` with a change that usually makes it invalid JSON."""
        rng = self._random
        at, length = rng.randrange(len(raw) + 1), rng.randrange(1, 20)
        colons = [i for i, byte in enumerate(raw) if byte == ord(":")] or [0]
        depth, colon = 10 ** rng.randrange(1, 6), rng.choice(colons) + 1
        deep = rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
        return rng.choice(
            (
                raw[:at],
                raw[:at] + raw[at + length :],
                raw[:at] + rng.randbytes(length) + raw[at:],
                raw[:at] + bytes((b ^ 1 << rng.randrange(8)) for b in raw[at : at + 1]) + raw[at + 1 :],
                rng.randbytes(10 * length),
                raw + raw,
                raw[:colon] + deep + b',"metadata":' + raw[colon:],
                raw[:colon] + b"9" * depth + b',"metadata":' + raw[colon:],
                raw.replace(b"{", b'{"n": 1, "prompt": 5, ', 1),  # doubled keys: the last one counts
                raw[:-1] + b', "n": 2, "model": "' + MODEL.encode() + b'"}',
                raw.replace(b'"', b"'"),
                b"\xef\xbb\xbf" + raw,
                raw.decode("utf-8", "replace").encode("utf-16"),
                raw.replace(b",", b",,", 1),
                raw[:-1] + b",}",
                b"/* */" + raw,
                b"",
            )
        )


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree that holds a value: its container and its key there. Of long lists only the first ten."""
    items: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree[:10]))
    for key, value in items:
        yield tree, key
        yield from _places(value)
