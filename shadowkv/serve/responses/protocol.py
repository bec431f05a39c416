"""Request body of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, WithJsonSchema, model_validator

from shadowkv.serve.bodies.body import Body, Name, Text, at_most, refusal, wrong
from shadowkv.serve.bodies.limits import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_METADATA_KEY_CHARS,
)
from shadowkv.serve.openai.converted import ConvertedChat, few_parts
from shadowkv.serve.openai.messages import Effort
from shadowkv.serve.openai.output_schema import checked_schema
from shadowkv.serve.openai.protocol import Sampling, Stops
from shadowkv.serve.responses.items import InputItem, messages_of
from shadowkv.serve.responses.tools import FunctionTool, ToolChoice, Tools, functions_of

Keep = Callable[[dict[str, Any]], Awaitable[None]]

NAMES = MappingProxyType({"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"})


class Format(Body):
    """Format of the answer. Only the type ``json_schema`` has a ``schema``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Format:
        if self.type == "json_schema":
            checked_schema({"schema": self.schema_})
        else:  # these fields have no effect and can be deeply nested, so answers do not repeat them
            self.name = self.description = self.schema_ = self.strict = None
        return self

    @property
    def repeated(self) -> dict[str, Any]:
        """The format in the form in which responses echo it."""
        if self.type != "json_schema":
            return {"type": self.type}
        about = {"name": self.name or "", "description": self.description, "strict": bool(self.strict)}
        return {"type": self.type, **about, "schema": self.schema_}

    def as_response_format(self) -> dict[str, Any]:
        """Returns the equivalent ``response_format`` of an OpenAI chat."""
        return {"type": self.type, **({"json_schema": {"schema": self.schema_}} if self.type == "json_schema" else {})}


class TextConfig(Body):
    """``text``."""

    format: Format = Format()
    verbosity: Literal["low", "medium", "high"] | None = None  # has no effect


class Reasoning(Body):
    """``reasoning``. ``summary`` has no effect."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[InputItem],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(few_parts),
]
Input = Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=Text | Items)]


def _few_pairs(value: dict[str, str]) -> dict[str, str]:
    at_most(MAX_METADATA, "pairs", len(value))
    for key, text in value.items():
        at_most(MAX_METADATA_KEY_CHARS, "characters of a key", len(key))
        at_most(MAX_METADATA_CHARS, "characters of a value", len(text))
    return value


Metadata = Annotated[
    dict[str, str],
    AfterValidator(_few_pairs),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_CHARS},
            "maxProperties": MAX_METADATA,
        }
    ),
]


LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")


def _known(value: str) -> str:
    if value not in INCLUDABLE:
        raise wrong(f"include can have {' and '.join(map(repr, INCLUDABLE))}; the latter has no effect")
    return value


class ResponsesRequest(ConvertedChat, Sampling):
    """Body of ``/v1/responses``. If it has a ``previous_response_id``, the earlier conversation is put into its
    ``input`` (``history.py``), and the body is read again. ``max_tool_calls`` limits calls of built-in tools, of which
    this server has none."""

    names = NAMES
    is_read_again = True

    input: Input
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stop: Stops = Field([])
    text: TextConfig = TextConfig()
    tools: Tools = Field([])
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    metadata: Metadata = Field({})
    include: Annotated[list[Annotated[str, AfterValidator(_known)]], Field(max_length=16, fail_fast=True)] = Field([])
    store: bool = True
    background: bool = False
    previous_response_id: Name | None = None
    max_tool_calls: int | None = Field(None, ge=1)
    top_logprobs: int = Field(0, ge=0, le=20)
    return_progress: bool = False
    timings_per_token: bool = False
    enable_response_messages: bool = False
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    _keep: Keep | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_response(self) -> ResponsesRequest:
        if self.background and not self.store:
            raise refusal("background", "background can only be used when `store` is true, as its answer is read later")
        if self.background and self.stream:
            raise refusal("background", "background is not supported with stream; leave one out, and GET the response")
        if self.top_logprobs and LOGPROBS not in self.include:
            raise refusal("top_logprobs", f"top_logprobs is only allowed with include=[{LOGPROBS!r}]")
        return self

    @property
    def functions(self) -> dict[str, tuple[FunctionTool, str | None]]:
        """Maps the full name of each function, which the model sees, to the function and its namespace."""
        return functions_of(self.tools)

    @property
    def keep(self) -> Keep | None:
        """The function that stores the answer; None if the answer is not to be stored."""
        return self._keep if self.store else None

    def kept_by(self, keep: Keep) -> None:
        """Sets the function that stores the answer. The function is not called if the request's ``store`` is false."""
        self._keep = keep

    def as_chat(self) -> dict[str, Any]:
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        return {
            "messages": messages_of(self.input, self.instructions),
            "max_tokens": self.max_output_tokens,
            "stop": self.stop,
            "response_format": self.text.format.as_response_format(),
            "tools": [
                {"type": "function", "function": {**tool.model_dump(exclude={"type"}, exclude_none=True), "name": name}}
                for name, (tool, _) in self.functions.items()
            ],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            **({"logprobs": True, "top_logprobs": self.top_logprobs} if LOGPROBS in self.include else {}),
            **({"stream": True, "return_progress": True} if self.stream and self.return_progress else {}),
            "timings_per_token": self.timings_per_token,
            "return_token_ids": self.enable_response_messages,
        }

    def drop(self) -> None:
        self.input = []
