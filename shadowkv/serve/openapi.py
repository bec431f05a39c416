"""What ``/openapi.json`` says about answers: exactly the statuses that a route has, each with its body."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from shadowkv.serve.answers import Error

STATUSES = {
    400: "The request is not valid.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, or nothing saved under such a name.",
    408: "The rest of the request did not come in time.",
    409: "What is saved under the name is of another model or policy, or its file is not what was written.",
    413: "The body is too long.",
    429: "As many requests with this API key are at work as may.",
    500: "The server has failed.",
    503: "The server is full, or the engine is not running.",
    504: "The request took longer than it may.",
}
FOR_EVERY_BODY = (400, 401, 404, 408, 413, 429, 500, 503)
FOR_EVERY_TEXT = (*FOR_EVERY_BODY, 504)
"""Statuses of routes that generate text."""

EVENT_STREAM = "text/event-stream"


def responses(
    answer: type[BaseModel] | None, *statuses: int, text: str | None = None, error: type[BaseModel] = Error
) -> dict[int | str, Any]:
    """FastAPI's ``responses`` for a route.

    Args:
        answer: the body of a 200 as JSON.
        statuses: the other ones, from ``STATUSES``.
        error: the body of those.
        text: media type that a 200 may have as well: a stream of server-sent events, or metrics.
    """
    well: dict[str, Any] = {} if answer is None else {"model": answer}
    if text is not None:
        well["content"] = {text: {}}  # OpenAPI 3.1 has no schema for the events of a stream
    return {200: well, **{status: {"model": error, "description": STATUSES[status]} for status in statuses}}


class Application(FastAPI):
    """FastAPI, without the 422 that it documents for every route that takes input: here that is a 400."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        for route in schema["paths"].values():
            for operation in route.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        return schema
