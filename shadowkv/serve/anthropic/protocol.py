"""Request bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, as in Anthropic's API."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shadowkv.serve.anthropic.blocks import TextContent, Turns, begun, messages_of
from shadowkv.serve.bodies.body import Body, Name, Text, refusal
from shadowkv.serve.bodies.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_TOOLS
from shadowkv.serve.openai.converted import ConvertedChat
from shadowkv.serve.openai.messages import Effort
from shadowkv.serve.openai.output_schema import checked_schema
from shadowkv.serve.openai.protocol import Sampling
from shadowkv.serve.openai.tools import FunctionName, within_limits

NAMES = MappingProxyType({"response_format": "output_config.format", "stop": "stop_sequences"})


class MessagesTool(Body):
    """A tool of the client. ``input_schema`` is the JSON schema of its input. Tools that run on the server are not
    supported."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def as_function(self) -> dict[str, Any]:
        """Returns the equivalent tool of an OpenAI chat."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema, **described}}


MessagesTools = Annotated[
    list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(within_limits)
]


class MessagesToolChoice(Body):
    """Whether the answer must call a tool, and which one. Only the type "tool" has a ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise refusal("name", "type 'tool' needs a name, and no other type has one")
        return self

    def as_choice(self) -> Any:
        """Returns the equivalent ``tool_choice`` of an OpenAI chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """Whether the model reasons. The chat template gets this as ``enable_thinking``. ``budget_tokens`` and ``display``
    have no effect."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """Output as JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    @model_validator(mode="after")
    def _check_schema(self) -> OutputFormat:
        checked_schema({"schema": self.schema_})
        return self


class OutputConfig(Body):
    """``output_config``."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class Prompt(ConvertedChat):
    """Body of ``/v1/messages/count_tokens``: the parts of a request that make up the prompt."""

    names = NAMES

    model: Name | None = None
    messages: Turns
    system: TextContent = Field([])
    tools: MessagesTools = Field([])
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    def as_chat(self) -> dict[str, Any]:
        choice, output = self.tool_choice, self.output_config
        thinks = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        schema = None if output.format is None else {"schema": output.format.schema_}
        return {
            "messages": messages_of(self.messages, self.system),
            "continue_final_message": begun(self.messages),
            "tools": [tool.as_function() for tool in self.tools],
            "tool_choice": None if choice is None else choice.as_choice(),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
            "reasoning_effort": output.effort,
            "chat_template_kwargs": {**thinks, **self.chat_template_kwargs},
        }

    def drop(self) -> None:
        self.messages, self.system, self.tools = [], [], []


StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class MessagesRequest(Prompt, Sampling):
    """Body of ``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[StopSequence] = Field([], max_length=MAX_STOP_STRINGS, fail_fast=True)

    def as_chat(self) -> dict[str, Any]:
        return {**super().as_chat(), "max_tokens": self.max_tokens, "stop": self.stop_sequences}
