"""What Open Responses' OpenAPI (specification of 2026-04-24) requires of a response and of a stream's events, as far as
this server has such items: written from that document for these tests, fields that it allows beside are left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Status = Literal["in_progress", "completed", "incomplete"]


class Schema(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TokenScore(Schema):
    token: str
    logprob: float
    bytes: list[int]


class OutputText(Schema):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[TokenScore] = []


class OtherText(Schema):
    type: Literal["input_text", "text", "summary_text", "reasoning_text"]
    text: str


Part = Annotated[OutputText | OtherText, Field(discriminator="type")]


class Message(Schema):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[Part]


class FunctionCall(Schema):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class Reasoning(Schema):
    type: Literal["reasoning"]
    id: str
    content: list[Part] = []
    summary: list[Part]


Item = Annotated[Message | FunctionCall | Reasoning, Field(discriminator="type")]


class FunctionTool(Schema):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class PlainFormat(Schema):
    type: Literal["text", "json_object"]


class TextField(Schema):
    format: PlainFormat
    verbosity: Literal["low", "medium", "high"] = "medium"


class ReasoningField(Schema):
    effort: Literal["none", "low", "medium", "high", "xhigh"] | None
    summary: Literal["concise", "detailed", "auto"] | None


class CachedTokens(Schema):
    cached_tokens: int


class ReasoningTokens(Schema):
    reasoning_tokens: int


class Usage(Schema):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedTokens
    output_tokens_details: ReasoningTokens


class IncompleteDetails(Schema):
    reason: str


class Failure(Schema):
    code: str
    message: str


class NamedChoice(Schema):
    type: Literal["function"]
    name: str


class ResponseResource(Schema):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    incomplete_details: IncompleteDetails | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Item]
    error: Failure | None
    tools: list[FunctionTool]
    tool_choice: Literal["none", "auto", "required"] | NamedChoice
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: TextField
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: ReasoningField | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: Any
    safety_identifier: str | None
    prompt_cache_key: str | None


class Event(Schema):
    sequence_number: int


class OfResponse(Event):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.failed",
        "response.incomplete",
    ]
    response: ResponseResource


class OfItem(Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item | None


class InItem(Event):
    item_id: str
    output_index: int


class OfPart(InItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Part


class TextDelta(InItem):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TokenScore] = []


class TextDone(InItem):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TokenScore] = []


class ArgumentsDelta(InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(InItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


AnyEvent: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        OfResponse | OfItem | OfPart | TextDelta | TextDone | ArgumentsDelta | ArgumentsDone,
        Field(discriminator="type"),
    ]
)
