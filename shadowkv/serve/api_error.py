"""The error that clients of the OpenAI API expect: ``{"error": {"message", "type", "param", "code"}}`` and a status.

Those of Anthropic's API, at its paths, expect another one: ``{"type": "error", "error": {"type", "message"}}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

TAG = "\0"
"""What tags of unions begin with, which pydantic has in its paths, and bodies have not."""

MAX_REASONS = 5
"""The first ones tell the story."""

LONGEST_GIVEN = 60
"""Characters of a refused value that an error says."""

MESSAGES_URL = "/v1/messages"
"""Of Anthropic's API; others begin with it."""

MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Its types of errors, by status; beside these there are two, of all other statuses."""

MAX_CHARS = 800
"""Of a message and of a parameter's name: either may quote the request."""


class ApiError(Exception):
    """A request that gets no answer, and why."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = _short(message), status, param and _short(param), code

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same in an API that calls parameters otherwise: by their names here, those there."""

        def name(match: re.Match[str]) -> str:
            return names.get(match[0], match[0])

        # In the middle of a sentence a name is one only if it cannot be a word.
        message = re.sub(r"^\w+|\b\w+_\w+\b", name, self.message)
        param = self.param and re.sub(r"^\w+", name, self.param)
        return ApiError(message, status=self.status, param=param, code=self.code)

    def body(self, path: str = "") -> dict[str, Any]:
        """The response body, as clients of that path expect it."""
        if path == MESSAGES_URL or path.startswith(f"{MESSAGES_URL}/"):
            kind = MESSAGES_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


def from_validation(errors: Sequence[Any]) -> ApiError:
    """One error for all that pydantic found; its ``param`` is the first one's."""
    reasons = []
    for error in errors[:MAX_REASONS]:
        param, reason = _param(error), error["msg"] + _given(error)
        reasons.append(f"{param}: {reason}" if param else reason)
    if len(errors) > MAX_REASONS:
        reasons.append(f"and {len(errors) - MAX_REASONS} more")
    return ApiError("; ".join(reasons), param=_param(errors[0]))


def _given(error: Any) -> str:
    """The value that was refused, where the message does not name it and it is short to say."""
    value = error.get("input")
    if error["type"] in ("value_error", "missing") or not isinstance(value, int | float | str):
        return ""
    if isinstance(value, str) and len(value) > LONGEST_GIVEN:  # which may be megabytes
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return f", not {text}" if len(text) <= LONGEST_GIVEN else ""


def _param(error: Any) -> str | None:
    places = [part for part in error["loc"] if not str(part).startswith(TAG)]
    path = [*places, *((error["ctx"]["param"],) if "param" in error.get("ctx", {}) else ())]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or None
