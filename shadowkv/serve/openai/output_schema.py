"""Constraints on an output. A constraint comes from ``response_format``, from vLLM's ``structured_outputs``, or from a
``tool_choice`` that forces calls, as the JSON schema of these calls. Its form is always a text: a JSON schema, or
another grammar (``grammar_text``)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shadowkv.engine.structured.json_schema import MAX_GRAMMAR_CHARS
from shadowkv.grammar_text import choice_text, grammar_text
from shadowkv.serve.bodies.body import Body, at_most, parse_json, refusal, wrong
from shadowkv.serve.openai.tools import Choice

RESPONSE_FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        "json_schema": {},
        "schema": {},
    },
    "required": ["type"],
}

MAX_CHOICES = 4_096
"""Maximum number of texts in ``choice``."""

ANY_OBJECT = '{"type": "object"}'


def format_text(value: Any) -> str | None:
    """Returns the constraint of a ``response_format`` as text; None if the output may be any text. A JSON schema is in
    the field ``json_schema``, as in OpenAI's API, or in the field ``schema``, as in llama.cpp's and SGLang's. Raises
    PydanticCustomError."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "structural_tag":
        return _tag_text(value)
    if kind not in ("json_object", "json_schema"):
        raise wrong("its type must be text, json_object, json_schema or structural_tag")
    named, beside = value.get("json_schema"), value.get("schema")
    if named is not None and beside is not None:
        raise wrong("it has two schemas, in json_schema and in schema; pass one")
    if kind == "json_object" and named is None and beside is None:
        return ANY_OBJECT
    return checked_schema(value if named is None else named)


def checked_schema(named: Any) -> str:
    """Returns the field ``schema`` of an object as JSON text. Raises PydanticCustomError."""
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise wrong("json_schema needs a schema, an object")
    return _dumped(schema)


def _dumped(schema: dict[str, Any]) -> str:
    try:
        text = json.dumps(schema)
    except RecursionError as error:
        raise wrong("the schema is nested too deeply") from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise wrong(f"the schema has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are supported")
    return text


def _tag_text(tag: dict[str, Any]) -> str:
    return grammar_text("structural_tag", _dumped(tag))


Rules = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[Rules], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``. Exactly one of the first six fields is set. A schema or a structural tag is an
    object or its JSON text. A grammar is in GBNF, which includes vLLM's EBNF."""

    json_: Annotated[Rules | dict[str, Any] | None, Field(alias="json")] = None
    regex: Rules | None = None
    choice: Choices | None = None
    grammar: Rules | None = None
    json_object: bool | None = None
    structural_tag: Rules | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    disable_additional_properties: Literal[False] = False

    @model_validator(mode="after")
    def _check_kind(self) -> StructuredOutputs:
        kinds = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None, self.structural_tag)
        if sum(kind is not None for kind in kinds) != 1:
            raise wrong("pass one of json, regex, choice, grammar, json_object and structural_tag")
        _ = self.text
        return self

    @property
    def text(self) -> str:
        """The constraint as text. Reading it raises PydanticCustomError if the constraint is invalid."""
        if self.json_ is not None:
            return _dumped(_object("json", self.json_))
        if self.regex is not None:
            return grammar_text("regex", self.regex)
        if self.choice is not None:
            at_most(MAX_GRAMMAR_CHARS, "characters of choices", sum(map(len, self.choice)))
            return choice_text(self.choice)
        if self.grammar is not None:
            return grammar_text("grammar", self.grammar)
        return ANY_OBJECT if self.structural_tag is None else _tag_text(_object("structural_tag", self.structural_tag))


def _object(name: str, value: str | dict[str, Any]) -> dict[str, Any]:
    try:
        value = parse_json(value.encode()) if isinstance(value, str) else value
    except ValueError as error:
        raise refusal(name, f"{name} must be an object or its JSON text: {error}") from error
    if not isinstance(value, dict):
        raise refusal(name, f"{name} must be an object or its JSON text")
    return value


def calls_schema(tools: list[dict[str, Any]], choice: Choice, parallel: bool) -> str:
    """Returns the JSON schema of an answer that calls tools, as JSON text. If ``choice`` names a function, the answer
    consists of that function's arguments, as in vLLM. Otherwise it is a list of objects with ``name`` and
    ``parameters``. The list has one item, or more if calls can be ``parallel``."""
    functions = [tool["function"] for tool in tools if choice.name in (None, tool["function"]["name"])]
    if choice.name is not None and functions:
        return json.dumps(functions[0]["parameters"])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "parameters": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, function in enumerate(functions)
    ]
    # References within a function's schema start at the root of that schema, so ``_moved`` has to adjust them.
    documents = {
        str(number): _moved(function["parameters"], f"/$defs/{number}") for number, function in enumerate(functions)
    }
    limit = {} if parallel else {"maxItems": 1}
    return json.dumps({"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit, "$defs": documents})


def _moved(value: Any, path: str) -> Any:
    """Returns a schema with its references adjusted, for when its root is moved to ``path``."""
    if isinstance(value, list):
        return [_moved(part, path) for part in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(part, path) for key, part in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#{path}{reference[1:]}"
    return moved
