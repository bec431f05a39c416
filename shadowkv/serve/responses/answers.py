"""Models of the responses of ``/v1/responses``. They only describe the responses in the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shadowkv.serve.http.routing import Answer
from shadowkv.serve.openai.answers import ScoredToken

Status = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(Answer):
    """Text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ScoredToken]


class ReasoningTextPart(Answer):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answer):
    """A message of the model."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Status
    content: list[OutputTextPart]


class OutputReasoning(Answer):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningTextPart]


class OutputCall(Answer):
    """A function call. ``arguments`` is JSON text. ``namespace`` is present if the function is in a namespace."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str = ""
    arguments: str
    status: Status


class InputTokensDetails(Answer):
    """Details of a prompt's tokens: how many were found in the prefix cache. Writes to the prefix cache are not
    counted, so ``cache_write_tokens`` is 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Details of the generated tokens: how many are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Answer):
    """Why an answer was cut short."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(Answer):
    """The error of a failed response."""

    code: str
    message: str


class RawMessage(Answer):
    """The prompt as the model reads it, or the answer as the model writes it."""

    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[int]


class Response(Answer):
    """Answer of ``/v1/responses``. It repeats the request's parameters. ``input_messages`` and ``output_messages`` are
    present if the request sets ``enable_response_messages``."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    presence_penalty: float
    frequency_penalty: float
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    input_messages: list[RawMessage] = Field([])
    output_messages: list[RawMessage] = Field([])


class DeletedResponse(Answer):
    """Answer of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class ItemList(Answer):
    """Answer of ``/v1/responses/{id}/input_items``. The newest item comes first, unless ``order`` is "asc"."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False]
