"""Input items of the Responses API, and their conversion to chat messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shadowkv.serve.bodies.body import Body, Dropped, Name, Text
from shadowkv.serve.bodies.limits import MAX_MESSAGES, MAX_TEXT_CHARS
from shadowkv.serve.openai.documents import FileSource
from shadowkv.serve.openai.messages import parsed_arguments
from shadowkv.serve.openai.unions import ByType
from shadowkv.serve.responses.tools import full_name

NO_TEXT = "images, audio and calls of built-in tools"


class ItemText(Body):
    """A text part of a message. The type ``text`` is accepted, too, because chats use it."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Dropped = None
    logprobs: Dropped = None


class InputFile(FileSource):
    """A document."""

    type: Literal["input_file"]


class ReasoningText(Body):
    """A text part of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: Text


Part = Annotated[ItemText | InputFile, ByType(NO_TEXT)]
Parts = Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Content = Annotated[Parts, BeforeValidator(_as_parts, json_schema_input_type=Text | Parts)]


def _checked(text: str) -> str:
    parsed_arguments(text)
    return text


class Item(Body):
    """Base of the items, with the fields that every item can have. These fields have no effect."""

    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message. The role ``developer`` is OpenAI's newer name for ``system``."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None  # for assistant messages only; it has no effect


class CallItem(Item):
    """A function call in an earlier turn."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    namespace: Name | None = None
    arguments: Annotated[str, Field(max_length=MAX_TEXT_CHARS), AfterValidator(_checked)]


class ResultItem(Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content


class ReasoningItem(Item):
    """The model's reasoning in an earlier turn. Summaries and encrypted content are dropped."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field([])
    summary: Dropped = None
    encrypted_content: Dropped = None


InputItem = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, ByType(NO_TEXT, default="message")]


def messages_of(items: Iterable[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """Converts items to the messages of an OpenAI chat. The instructions and the system messages at the beginning
    become one message, as chat templates expect. Consecutive items of the model (reasoning, messages and calls) become
    one message, too."""
    messages: list[dict[str, Any]] = []
    systems = [] if instructions is None else [instructions]
    turn: _Turn | None = None
    for item in items:
        if isinstance(item, CallItem | ReasoningItem) or (isinstance(item, MessageItem) and item.role == "assistant"):
            turn = turn or _Turn()
            turn.add(item)
            continue
        if turn is not None:
            messages.append(turn.message())
            turn = None
        if isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.role != "user" and not messages:
            systems.append(_text(item.content))
        else:
            messages.append({"role": item.role, "content": _text(item.content)})
    if turn is not None:
        messages.append(turn.message())
    return [*([{"role": "system", "content": "\n\n".join(systems)}] if systems else []), *messages]


@dataclass
class _Turn:
    """Consecutive items of the model, which become one message."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, item: InputItem) -> None:
        if isinstance(item, CallItem):
            function = {"name": full_name(item.namespace, item.name), "arguments": item.arguments}
            self.calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ReasoningItem):
            self.thoughts.append(_text(item.content))
        elif isinstance(item, MessageItem):
            self.texts.append(_text(item.content))

    def message(self) -> dict[str, Any]:
        thought = "\n".join(filter(None, self.thoughts))
        return {
            "role": "assistant",
            "content": "\n".join(self.texts),
            "tool_calls": self.calls,
            **({"reasoning_content": thought} if thought else {}),
        }


def _text(parts: Iterable[ItemText | InputFile | ReasoningText]) -> str:
    return "\n".join(part.text for part in parts)
