"""Errors as clients of the OpenAI API expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse

from shadowkv.engine.async_engine import EngineBusy, EngineDead
from shadowkv.engine.request import RequestError
from shadowkv.serve.merge import DeadlineExceeded

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2
"""What a full queue advises."""

MAX_REASONS = 5
"""A prompt of a million wrong items has as many reasons; the first ones tell the story."""


MAX_CHARS = 800
"""Of a message and of a parameter's name: either may quote the request."""


class ApiError(Exception):
    """A request that gets no answer, and why."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = _short(message), status, param and _short(param), code

    def body(self) -> dict[str, Any]:
        """The response body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of ``error``; what is nobody's fault but ours is logged and not shown."""
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
    logger.error("a request failed", exc_info=error)
    return ApiError("internal error; the server's log has the details", status=500)


def error_response(error: ApiError) -> JSONResponse:
    """The response for it."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.code == "queue_full" else None
    return JSONResponse(error.body(), error.status, headers)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """One error for all that pydantic found; its ``param`` is the first one's."""
    reasons = []
    for error in errors[:MAX_REASONS]:
        param = _param(error)
        reasons.append(f"{param}: {error['msg']}" if param else error["msg"])
    if len(errors) > MAX_REASONS:
        reasons.append(f"and {len(errors) - MAX_REASONS} more")
    return ApiError("; ".join(reasons), param=_param(errors[0]))


def _param(error: Any) -> str | None:
    path = [*error["loc"], *((error["ctx"]["param"],) if "param" in error.get("ctx", {}) else ())]
    if path[:1] == ["body"]:
        path = path[1:]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or None
