"""The JSON schema that an output has to follow: ``response_format``'s, or that of calls that ``tool_choice`` forces."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticCustomError

from shadowkv.engine.structured.json_schema import MAX_SCHEMA_CHARS
from shadowkv.serve.openai.tools import Choice

RESPONSE_FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {}},
    "required": ["type"],
}

ANY_OBJECT = '{"type": "object"}'


def json_schema(value: Any) -> str | None:
    """The schema that the output has to follow, as JSON text; None for plain text. Raises PydanticCustomError."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise _refusal("its type must be text, json_object or json_schema")
    return checked_schema(value.get("json_schema"))


def checked_schema(named: Any) -> str:
    """The schema, as JSON text, in the ``schema`` field of an object; raises PydanticCustomError."""
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise _refusal("json_schema needs a schema, an object")
    try:
        text = json.dumps(schema)
    except RecursionError as error:
        raise _refusal("the schema is nested too deeply") from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise _refusal(f"the schema has {len(text)} characters, {MAX_SCHEMA_CHARS} are supported")
    return text


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError("response_format", "{message}", {"message": message})


def calls_schema(tools: list[dict[str, Any]], choice: Choice, parallel: bool) -> str:
    """The JSON schema, as JSON text, of an answer that calls tools, as in vLLM: the arguments of the named function, or
    a list of objects with ``name`` and ``parameters``, with one item where calls may not be parallel."""
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
    # Each function's schema is a separate document, whose references begin at its root.
    documents = {
        str(number): _moved(function["parameters"], f"/$defs/{number}") for number, function in enumerate(functions)
    }
    limit = {} if parallel else {"maxItems": 1}
    return json.dumps({"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit, "$defs": documents})


def _moved(value: Any, path: str) -> Any:
    """A schema with its references adjusted for its root now being at ``path``."""
    if isinstance(value, list):
        return [_moved(part, path) for part in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(part, path) for key, part in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#{path}{reference[1:]}"
    return moved
