"""From a body's bytes to a request: the one path for short bodies, long ones and lines of a batch file."""

from __future__ import annotations

from json import JSONDecodeError
from typing import Any, TypeVar

from pydantic import ValidationError

from shadowkv.serve import strict_json
from shadowkv.serve.api_error import ApiError, from_validation
from shadowkv.serve.body import Body

B = TypeVar("B", bound=Body)


def read_body(raw: bytes, model: type[B]) -> B:
    """The request in a body; raises ApiError."""
    try:
        value = strict_json.parse(raw)
    except JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error.msg}") from error
    return validated(value, model)


def validated(value: Any, model: type[B]) -> B:
    """The request in a JSON value; raises ApiError."""
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from error
    body.finish()
    return body
