"""``response_format``: plain text, any JSON object, or JSON that follows a schema."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticCustomError

from shadowkv.engine.structured.json_schema import MAX_SCHEMA_CHARS

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
