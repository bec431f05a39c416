"""Errors in the formats that clients expect, each with its HTTP status.

OpenAI's API has ``{"error": {"message", "type", "param", "code"}}``. Anthropic's paths have ``{"type": "error",
"error": {"type", "message"}}``. llama.cpp's own paths have llama.cpp's types, and the status as the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

TAG = "\0"
"""Prefix of the tags of pydantic unions. pydantic puts these tags into the paths of its errors. Parts of a path that
begin with the prefix are not shown to clients."""

MAX_REASONS = 5
"""Maximum number of reasons to report: the first ones are the informative ones."""

LONGEST_GIVEN = 60
"""Maximum length of a refused value that an error repeats, in characters."""

MESSAGES_URL = "/v1/messages"
"""Path of Anthropic's API; all its paths begin with it."""

MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status. ``ApiError.body`` adds the two types for all other statuses."""

OWN_KINDS = frozenset(("refused", "wrong", "unsupported"))
"""pydantic error types of this package's validators. Messages do not repeat them, since they add nothing."""

LLAMA_PATHS = frozenset(("/completion", "/completions", "/apply-template", "/props", "/slots"))
"""llama.cpp's own paths."""

LLAMA_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
"""llama.cpp's error types by status. ``ApiError.body`` adds the two types for all other statuses, and the type for a
prompt that is too long."""

MAX_CHARS = 800
"""Maximum length of a message and of a parameter's name, since both can quote the request."""


class ApiError(Exception):
    """The error of a request. ``counts`` become extra fields of the error's body, such as numbers of tokens."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.counts = dict(counts or {})
        self.message, self.status, self.param, self.code = _short(message), status, param and _short(param), code

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Returns the error with another API's parameter names. ``names`` maps the names used here to the names of that
        API."""

        def name(match: re.Match[str]) -> str:
            return names.get(match[0], match[0])

        # Inside a sentence, only names with an underscore are replaced: others could be ordinary words.
        message = re.sub(r"^\w+|\b\w+_\w+\b", name, self.message)
        param = self.param and re.sub(r"^\w+", name, self.param)
        return ApiError(message, status=self.status, param=param, code=self.code, counts=self.counts)

    def body(self, path: str = "") -> dict[str, Any]:
        """The response body in the format of ``path``'s API."""
        if path == MESSAGES_URL or path.startswith(f"{MESSAGES_URL}/"):
            kind = MESSAGES_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        code: str | int | None = self.code
        if path in LLAMA_PATHS:
            too_long = self.code == "context_length_exceeded"
            kind = "exceed_context_size_error" if too_long else LLAMA_KINDS.get(self.status, kind)
            code = self.status
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code, **self.counts}}


def server_stopping() -> ApiError:
    """The error of requests that are dropped because the server stops."""
    return ApiError("the server is stopping", status=503, code="server_stopping")


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


def from_validation(errors: Sequence[Any]) -> ApiError:
    """Returns one error for all of pydantic's errors. ``param`` is the parameter of the first error. ``code`` is
    pydantic's type of the first error, or None if the type is one of this package's own."""
    reasons = []
    for error in errors[:MAX_REASONS]:
        param, reason = _param(error), error["msg"] + _given(error)
        if error["type"] not in OWN_KINDS:
            reason += f" ({error['type']})"  # as in vLLM: ``code`` only has the first error's type
        reasons.append(f"{param}: {reason}" if param else reason)
    if len(errors) > MAX_REASONS:
        reasons.append(f"and {len(errors) - MAX_REASONS} more")
    kind = errors[0]["type"]
    return ApiError("; ".join(reasons), param=_param(errors[0]), code=None if kind in OWN_KINDS else kind)


def _given(error: Any) -> str:
    """Returns the text that repeats the refused value; empty if the value is long or the message already has it."""
    value = error.get("input")
    if error["type"] in ("value_error", "missing") or not isinstance(value, int | float | str):
        return ""
    if isinstance(value, str) and len(value) > LONGEST_GIVEN:  # the value may have megabytes
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return f", not {text}" if len(text) <= LONGEST_GIVEN else ""


def _param(error: Any) -> str | None:
    places = [part for part in error["loc"] if not str(part).startswith(TAG)]
    path = [*places, *((error["ctx"]["param"],) if "param" in error.get("ctx", {}) else ())]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or None
