"""The error that clients of the OpenAI API expect: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_REASONS = 5
"""The first ones tell the story."""

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
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or None
