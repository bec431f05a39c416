"""Routes with what FastAPI lacks: bodies are read by the application's ``BodyReader``, and ``/openapi.json`` lists
exactly the statuses of each route, with their bodies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, TypeVar, cast

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect

from shadowkv.serve.bodies.body import Attachments, Body, HasDocuments, read_body
from shadowkv.serve.bodies.reader import SHORT_BYTES, BodyReader
from shadowkv.serve.http.errors import BodyRefused, as_api_error
from shadowkv.serve.http.owners import current_tenant, owner_of
from shadowkv.serve.http.replies import unless_disconnected
from shadowkv.serve.storage.store import RecordStore

B = TypeVar("B", bound=Body)

STATUSES = {
    400: "The request is not valid.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, or nothing is saved under this name.",
    408: "The rest of the request did not arrive in time.",
    409: "The saved prompt belongs to another model or policy, or its file is corrupt.",
    413: "The body is too long.",
    429: "This API key has reached its limit of concurrent requests.",
    500: "The server has failed.",
    501: "A flag disables this endpoint.",
    503: "The server is full, or the engine is not running.",
    504: "The request exceeded the server's time limit.",
}
FOR_EVERY_BODY = (400, 401, 404, 408, 413, 429, 500, 503)
FOR_EVERY_TEXT = (*FOR_EVERY_BODY, 504)
"""Statuses of routes that generate text."""
FOR_EVERY_RECORD = (401, 404, 429, 500, 503)
"""Statuses of routes that read or change what is stored."""

EVENT_STREAM = "text/event-stream"


class _Request(Request):
    model: type[Body]

    async def body(self) -> bytes:  # the result is a bytearray, which works as well
        # Each piece is appended as it arrives: joining 32 MiB of pieces at the end would block the event loop.
        if not hasattr(self, "_body"):
            received = bytearray()
            async for piece in self.stream():
                received += piece
            self._body = cast("bytes", received)
        return self._body

    async def json(self) -> Any:
        raw = await self.body()
        reading = read_request(self, raw, self.model)
        try:
            body: Any = await (unless_disconnected(self.receive, reading) if len(raw) > SHORT_BYTES else reading)
        except Exception as error:  # FastAPI would turn any other exception into a 400, even a server error
            raise BodyRefused(as_api_error(error)) from error
        finally:
            if isinstance(raw, bytearray) and not self.model.is_read_again:
                raw.clear()  # frees memory: FastAPI holds the body until the request is answered
        if body is None:
            raise ClientDisconnect
        return body


async def read_request(request: Request, raw: bytes, model: type[B]) -> B:
    """Returns the request in a body, with the text of the documents that it refers to. Raises ApiError."""
    state = request.app.state
    bodies: BodyReader = state.bodies
    try:
        body = await bodies.read(raw, model, current_tenant())
    except HasDocuments:
        documents: BodyReader = state.documents
        store: RecordStore = state.store
        here = Attachments(store.folder_of(owner_of(request)))
        body = await documents.apart(raw, partial(read_body, model=model, documents=here), current_tenant())
    if (named := getattr(body, "model", None)) is not None:
        body.model = state.settings.first_name(named)  # type: ignore[attr-defined]
    return body


class BodyRoute(APIRoute):
    """A route whose body, if it has one, is a ``Body``: FastAPI receives it already parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            request = _Request(request.scope, request.receive)
            if self.body_field is not None:
                request.model = cast("type[Body]", self.body_field.field_info.annotation)
            return await handler(request)

        return handle


class Answer(BaseModel):
    """Base of response models: it forbids extra fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """What is wrong. ``n_prompt_tokens`` and ``n_ctx``, which are llama.cpp's, are present if a prompt is too long for
    the context."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class Error(Answer):
    """Body of every status from 400 on."""

    error: ErrorDetail


def documented(
    answer: type[BaseModel] | None, *statuses: int, text: str | None = None, error: type[BaseModel] = Error
) -> dict[str, Any]:
    """FastAPI's arguments for a route. The route's answers are sent unchecked: the models only describe them.

    Args:
        answer: the model of a 200's JSON body; None if there is no model.
        statuses: the other statuses, from ``STATUSES``.
        error: the model of the other statuses' body.
        text: a media type besides JSON that a 200 can have: server-sent events, or the text of metrics.
    """
    well: dict[str, Any] = {} if answer is None else {"model": answer}
    if text is not None:
        well["content"] = {text: {}}  # OpenAPI 3.1 has no schema for the events of a stream
    errors = {status: {"model": error, "description": STATUSES[status]} for status in statuses}
    return {"response_model": None, "responses": {200: well, **errors}}


class Application(FastAPI):
    """FastAPI without the 422 that it documents for every route with input: this server responds with 400 instead."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        for route in schema["paths"].values():
            for operation in route.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        return schema
