"""Content blocks of Anthropic's messages, and their conversion to chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shadowkv.serve.bodies.body import Body, Dropped, Name, Text, bounded, wrong
from shadowkv.serve.bodies.limits import MAX_MESSAGES, MAX_TEXT_CHARS
from shadowkv.serve.openai.converted import few_parts
from shadowkv.serve.openai.documents import FileData, as_prompt, file_text
from shadowkv.serve.openai.unions import ByType

NO_TEXT = "images, search results and blocks of server tools"


class TextBlock(Body):
    """A block of text."""

    type: Literal["text"]
    text: Text
    citations: Dropped = None


TextOnly = Annotated[TextBlock, ByType(NO_TEXT)]


class Base64Source(Body):
    """A PDF as base64."""

    type: Literal["base64"]
    media_type: Literal["application/pdf"]
    data: FileData

    def read(self) -> str:
        """Returns the document's text. Raises what ``file_text`` raises."""
        return file_text(self.data, None)


class TextSource(Body):
    """Plain text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: Text

    def read(self) -> str:
        """The text."""
        return self.data


class ContentSource(Body):
    """Text as a list of blocks."""

    type: Literal["content"]
    content: TextContent

    def read(self) -> str:
        """The text."""
        return text_of(self.content)


class IdSource(Body):
    """A file of ``/v1/files``."""

    type: Literal["file"]
    file_id: Name

    def read(self) -> str:
        """Returns the file's text. Raises what ``file_text`` raises."""
        return file_text(None, self.file_id)


Source = Annotated[Base64Source | TextSource | ContentSource | IdSource, ByType("URLs")]


class DocumentBlock(Body):
    """A document. Answers contain no citations of it."""

    type: Literal["document"]
    source: Source
    title: Text | None = None
    context: Text | None = None
    citations: Dropped = None

    @property
    def text(self) -> str:
        """The document's text for the prompt. Reading it raises what ``file_text`` raises."""
        return as_prompt(self.source.read(), self.title, self.context)


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextOnly], Field(max_length=MAX_MESSAGES, fail_fast=True)]
TextContent = Annotated[Texts, BeforeValidator(_as_blocks, json_schema_input_type=Text | Texts)]


Readable = Annotated[TextBlock | DocumentBlock, ByType(NO_TEXT)]
ReadableBlocks = Annotated[list[Readable], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Result = Annotated[ReadableBlocks, BeforeValidator(_as_blocks, json_schema_input_type=Text | ReadableBlocks)]


class ToolUseBlock(Body):
    """A tool call in an earlier turn."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Annotated[dict[str, Any], AfterValidator(partial(bounded, MAX_TEXT_CHARS))]


class ToolResultBlock(Body):
    """The result of a tool call. ``is_error`` has no effect: the model sees an error only if ``content`` describes
    it."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Result = Field([])
    is_error: bool = False


class ThinkingBlock(Body):
    """The model's reasoning in an earlier turn. Its ``signature`` is not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedThinkingBlock(Body):
    """Another model's encrypted reasoning. It does not become part of the prompt."""

    type: Literal["redacted_thinking"]
    data: Text


Block = Annotated[
    TextBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    ByType(NO_TEXT),
]
Blocks = Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[Blocks, BeforeValidator(_as_blocks, json_schema_input_type=Text | Blocks)]


def _asks(turns: list[Turn]) -> list[Turn]:
    if begun(turns) and not all(isinstance(block, TextBlock) for block in turns[-1].content):
        raise wrong("the last message, if its role is 'assistant', is continued and must have only text blocks")
    for turn in turns:
        for block in turn.content:
            is_the_users = isinstance(block, ToolResultBlock | DocumentBlock)
            if is_the_users != (turn.role == "user") and not isinstance(block, TextBlock):
                raise wrong(f"a message of the role {turn.role!r} cannot have a block of type {block.type!r}")
    return turns


def begun(turns: list[Turn]) -> bool:
    """Whether the last message is the assistant's. The answer then continues it."""
    return turns[-1].role == "assistant"


Turns = Annotated[
    list[Turn],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(few_parts),
    AfterValidator(_asks),
]


def messages_of(turns: Iterable[Turn], system: Iterable[TextBlock]) -> list[dict[str, Any]]:
    """Returns the conversation as messages of an OpenAI chat."""
    messages = [{"role": "system", "content": text}] if (text := text_of(system)) else []
    for turn in turns:
        messages += [_assistant(turn.content)] if turn.role == "assistant" else _user(turn.content)
    return messages


def text_of(blocks: Iterable[Any]) -> str:
    """Returns the text of all text and document blocks, joined by line ends."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock | DocumentBlock))


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return {
        "role": "assistant",
        "content": text_of(blocks),
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
            for call in calls
        ],
        **({"reasoning_content": thoughts} if thoughts else {}),
    }


def _user(blocks: list[Block]) -> list[dict[str, Any]]:
    """Converts a user message to chat messages. Each tool result becomes a message of its own. The order of results and
    text is kept."""
    messages: list[dict[str, Any]] = []
    texts: list[TextBlock | DocumentBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock | DocumentBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                messages.append({"role": "user", "content": text_of(texts)})
                texts = []
            result = {"tool_call_id": block.tool_use_id, "content": text_of(block.content)}
            messages.append({"role": "tool", **result})
    if texts or not messages:
        messages.append({"role": "user", "content": text_of(texts)})
    return messages
