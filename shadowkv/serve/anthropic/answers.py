"""Models of the responses of ``/v1/messages``. They only describe the responses in the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal

from shadowkv.serve.http.routing import Answer


class MessagesErrorDetail(Answer):
    """The error's type and message."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "timeout_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "api_error",
    ]
    message: str


class MessagesError(Answer):
    """Body of every response with a status of 400 or more."""

    type: Literal["error"]
    error: MessagesErrorDetail


class Text(Answer):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class Thoughts(Answer):
    """The model's reasoning. It is not signed, so ``signature`` is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUse(Answer):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """Token counts. ``input_tokens`` does not include the tokens that were found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesAnswer(Answer):
    """Answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Text | Thoughts | ToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    """Answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
