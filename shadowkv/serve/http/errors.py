"""Maps exceptions to the errors that clients see, and makes the responses for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from shadowkv.engine.request import EngineBusy, EngineDead, EngineStopped, RequestError, SchemaTimeout
from shadowkv.prefix_cache.protocol import DiskTooSlow, NotDone, UnknownName, UnusableName
from shadowkv.serve.bodies.api_error import ApiError, server_stopping
from shadowkv.serve.http.request_record import current_record

logger = logging.getLogger("shadowkv.serve.errors")  # the name that the log shows

INTERNAL_ERROR = "internal error; the server's log has the details"

TOO_LONG = "the request took longer than this server allows"
"""Error message for a request that exceeds --request-timeout."""

SAVES = {
    UnknownName: (404, "unknown_name"),
    UnusableName: (409, "unusable_name"),
    NotDone: (503, "not_done"),
    DiskTooSlow: (504, "timeout"),
}
"""Status and code of each failure to save or restore a prompt by name."""

RETRY_SECONDS = 2
"""Seconds after which a client should retry, if the queue is full or the client's API key has reached its limit of
requests."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client disconnected before the answer. Only the log shows it."""

LINGER_SECONDS = 5.0
"""Maximum time, in seconds, for which the server continues to read a refused body."""


class DeadlineExceeded(Exception):
    """A request took longer than the server allows."""


class BodyTooLarge(HTTPException):
    """A body that exceeded the limit while it arrived."""


class BodyRefused(HTTPException):
    """A body that was refused. It is an HTTPException, because FastAPI would turn any other exception that comes from
    reading a body into a 400, and not log it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, error.message)
        self.error = error


def as_api_error(error: Exception) -> ApiError:
    """The error that a client sees for ``error``. The server's own errors are logged, and the client sees no
    details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SchemaTimeout):
        return ApiError(str(error), status=504, param=error.param, code="timeout")
    if isinstance(error, RequestError):
        return ApiError(str(error), param=error.param)
    if isinstance(error, PydanticCustomError):  # a parameter that could only be checked with the prompt's length
        return ApiError(error.message(), param=(error.context or {}).get("param"))
    if isinstance(error, EngineStopped):
        return server_stopping()
    if isinstance(error, EngineDead):
        return ApiError(str(error), status=503, code="engine_dead")
    if isinstance(error, EngineBusy):
        return ApiError(f"{error}; try again later", status=503, code="queue_full")
    if isinstance(error, DeadlineExceeded):
        return ApiError(str(error), status=504, code="timeout")
    if (kind := next((kind for kind in SAVES if isinstance(error, kind)), None)) is not None:
        status, code = SAVES[kind]
        return ApiError(str(error), status=status, param="name" if status < 500 else None, code=code)
    record = current_record()
    logger.error("%s failed", "a request" if record is None else f"request {record.id}", exc_info=error)
    return ApiError(INTERNAL_ERROR, status=500)


def error_response(error: ApiError, path: str) -> JSONResponse:
    """The response for ``error`` to a request for ``path``."""
    again = error.code in ("queue_full", "rate_limit_exceeded")
    headers = {"Retry-After": str(RETRY_SECONDS)} if again else None
    return JSONResponse(error.body(path), error.status, headers)


def too_large(message: str, path: str) -> JSONResponse:
    """The response to a request for ``path`` whose body is too large."""
    return _Lingering(ApiError(message, status=413, code="body_too_large").body(path), 413, {"Connection": "close"})


class _Lingering(JSONResponse):
    """Responds, and then reads the rest of the body for at most ``LINGER_SECONDS``: many clients do not look at the
    answer before they have sent the whole body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def drain() -> None:
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drain(), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b""})


def handle_errors(app: FastAPI) -> None:
    """Registers handlers that answer exceptions in the format of each path's API."""

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        # There is no body, or one of another content type. Other types are refused on purpose: a browser lets any web
        # page post them to a local server without a preflight request.
        text = "the request needs a JSON object as its body, and the header Content-Type: application/json"
        return error_response(ApiError(text), request.url.path)

    @app.exception_handler(ApiError)
    @app.exception_handler(EngineDead)
    async def on_known(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error), request.url.path)

    @app.exception_handler(BodyRefused)
    async def on_refused(request: Request, refused: BodyRefused) -> Response:
        return error_response(refused.error, request.url.path)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = error_response(ApiError(message, status=error.status_code), request.url.path)
        response.headers.update(error.headers or {})  # the header Allow of a 405 (RFC 9110, 15.5.6)
        return response

    @app.exception_handler(BodyTooLarge)
    async def on_large(request: Request, error: BodyTooLarge) -> Response:
        return too_large(error.detail, request.url.path)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        # Starlette raises the exception again after the answer, and the server logs it.
        response = error_response(ApiError(INTERNAL_ERROR, status=500), request.url.path)
        if (record := current_record()) is not None:  # this response does not pass the middleware that adds the id
            response.headers["X-Request-Id"] = record.id
        return response

    @app.exception_handler(ClientDisconnect)
    async def on_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # the client is gone
