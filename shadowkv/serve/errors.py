"""What clients are told about an exception, and the response that tells them."""

from __future__ import annotations

import logging

from fastapi.responses import JSONResponse

from shadowkv.engine.async_engine import EngineBusy, EngineDead
from shadowkv.engine.request import RequestError
from shadowkv.prefix_cache.protocol import DiskTooSlow, NotDone, UnknownName, UnusableName
from shadowkv.serve.api_error import ApiError
from shadowkv.serve.merge import DeadlineExceeded
from shadowkv.serve.request_record import current_record

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "internal error; the server's log has the details"

SAVES = {
    UnknownName: (404, "unknown_name"),
    UnusableName: (409, "unusable_name"),
    NotDone: (503, "not_done"),
    DiskTooSlow: (504, "timeout"),
}
"""Status and code for what cannot be saved or restored by name."""

RETRY_SECONDS = 2
"""Seconds after which a client is advised to retry, for a full queue or a key that has reached its request limit."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about ``error``; our own errors are logged and not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(str(error), param=error.param)
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
    """The response for it, to a request for that path."""
    again = error.code in ("queue_full", "rate_limit_exceeded")
    headers = {"Retry-After": str(RETRY_SECONDS)} if again else None
    return JSONResponse(error.body(path), error.status, headers)
