"""Conversations: messages, tools and variables of chat templates. They are converted from the form in requests to the
form that chat templates expect."""

from __future__ import annotations

import json
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shadowkv.serve.bodies.body import Body, Name, Text, at_most, bounded, parse_json, refusal, wrong
from shadowkv.serve.bodies.limits import MAX_MESSAGES, MAX_TEMPLATE_CHARS, MAX_TEXT_CHARS
from shadowkv.serve.openai.documents import FilePart
from shadowkv.serve.openai.tools import Tools
from shadowkv.serve.openai.unions import ByType
from shadowkv.serve.text.tool_formats import FORMATS, HARMONY, names_tools

RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens", "parse_special")
    + ("chat_template", "check", "self")
)
"""Names that ``chat_template_kwargs`` cannot set. A template gets variables of these names in other ways, or not at
all."""

EXPLANATION = (
    "You can call tools. To do so, answer with nothing but a JSON list of the calls, each of which is an object with "
    '"name" and "parameters". Where no tool is needed, answer in plain text. These are the tools:'
)


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: Text


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextParts = Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Prediction(Body):
    """``prediction``: text that the answer may contain. If the server drafts tokens (``--speculative-config``), a
    prediction makes the answer faster. It never changes the answer."""

    type: Literal["content"]
    content: Annotated[TextParts, BeforeValidator(_as_parts, json_schema_input_type=Text | TextParts)]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(part.text for part in self.content)


Part = Annotated[TextPart | FilePart, ByType("images and audio")]
Parts = Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def parsed_arguments(text: str) -> dict[str, Any]:
    """Parses a call's arguments. Templates get them as an object, because each template writes them in its own way."""
    try:
        value = parse_json(text.encode()) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise wrong(f"must be the JSON text of an object: {error.msg}") from error
    if not isinstance(value, dict):
        raise wrong("must be the JSON text of an object")
    bounded(MAX_TEXT_CHARS, value)
    return value


if TYPE_CHECKING:
    Arguments = dict[str, Any]
else:
    Arguments = Annotated[str, Field(max_length=MAX_TEXT_CHARS), AfterValidator(parsed_arguments)]


class CalledFunction(Body):
    """The called function and its arguments."""

    name: Name
    arguments: Arguments


class ToolCall(Body):
    """A tool call in an earlier message."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streamed calls have an index, which clients may send back

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """One message of a conversation. The role ``developer`` is OpenAI's newer name for ``system``. What other roles
    mean depends on the chat template. ``reasoning`` is vLLM's newer name for ``reasoning_content``."""

    role: Annotated[Name, Field(min_length=1)]
    content: Annotated[Parts | None, BeforeValidator(_as_parts, json_schema_input_type=Text | Parts)] = None
    name: Name | None = None
    tool_calls: list[ToolCall] = Field([], max_length=MAX_MESSAGES, fail_fast=True)
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise refusal("content", "content is required, except in an assistant message with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise refusal("tool_calls", f"only assistant messages have tool_calls, and this is a {self.role} message")
        for name in ("reasoning_content", "reasoning"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise refusal(name, f"only assistant messages have {name}, and this is a {self.role} message")
        if self.reasoning is not None and self.reasoning_content not in (None, self.reasoning):
            raise refusal("reasoning", "reasoning and reasoning_content differ; pass one of them")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            reason = "tool messages need a tool_call_id, the id of the call that they answer; other messages have none"
            raise refusal("tool_call_id", reason)
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect. Its content is always a string, which may be
        empty."""
        optional = {
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning if self.reasoning_content is None else self.reasoning_content,
        }
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": "\n".join(part.text for part in self.content or ()),
            **{name: value for name, value in optional.items() if value is not None},
        }


def _within_limits(value: Any) -> Any:
    """Checks the size of all messages together, before any message is validated."""
    if isinstance(value, list):
        messages = [message for message in value if isinstance(message, dict)]
        contents = [message.get("content") for message in messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        calls = [call for message in messages for call in _list(message.get("tool_calls")) if isinstance(call, dict)]
        functions = [call["function"] for call in calls if isinstance(call.get("function"), dict)]
        texts = contents + [part.get("text") for part in parts if isinstance(part, dict)]
        texts += [function.get("arguments") for function in functions]
        texts += [message.get(name) for message in messages for name in ("reasoning_content", "reasoning")]
        at_most(MAX_MESSAGES, "content parts", len(parts))
        at_most(MAX_MESSAGES, "tool calls", len(calls))
        at_most(MAX_TEXT_CHARS, "characters", sum(len(text) for text in texts if isinstance(text, str)))
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _variables(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in RESERVED or not name.isidentifier():
            raise wrong(f"{name[:40]!r} cannot be set as a variable of the chat template")
    bounded(MAX_TEMPLATE_CHARS, value)
    return value


def _few_values(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checks two totals over all messages: the characters, including the text of documents, and the values in the
    arguments of calls."""
    at_most(MAX_TEXT_CHARS, "characters", sum(len(turn["content"]) for turn in turns))
    calls = [call["function"]["arguments"] for turn in turns for call in turn.get("tool_calls", ())]
    bounded(MAX_TEXT_CHARS, calls)
    return turns


# Messages are validated as pydantic models, and then kept as the dictionaries that templates expect. The process that
# reads bodies sends them to another process. Thousands of plain dictionaries are sent quickly, models are slow to send.
if TYPE_CHECKING:
    Turn = dict[str, Any]
else:
    Turn = Annotated[Message, AfterValidator(Message.for_template)]
Turns = Annotated[
    list[Turn],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_within_limits),
    AfterValidator(_few_values),
]


Variables = Annotated[dict[str, Any], AfterValidator(_variables)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Values of ``reasoning_effort``."""


class Conversation(Body):
    """The parts of a request that make up a chat's prompt."""

    messages: Turns | None = None
    tools: Tools = Field([])
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: Variables = Field({})
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_conversation(self) -> Conversation:
        for name in ("tools", "chat_template", "chat_template_kwargs", "reasoning_effort", "continue_final_message"):
            if self.messages is None and getattr(self, name):
                raise refusal(name, f"{name} needs messages; leave it out, since a prompt uses no template")
        if self.continue_final_message:
            self._check_continued()
        return self

    def _check_continued(self) -> None:
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            reason = "continue_final_message continues the last message, so leave add_generation_prompt out"
            raise refusal("add_generation_prompt", reason)
        last = (self.messages or [{"role": ""}])[-1]
        if last["role"] != "assistant" or "tool_calls" in last:
            reason = "the last message, which is continued, must be the assistant's and have no tool_calls"
            raise refusal("continue_final_message", reason)

    @property
    def has_next_turn(self) -> bool:
        """Whether the prompt ends with the opening of a new assistant message."""
        return self.add_generation_prompt and not self.continue_final_message

    @property
    def remote_prompt(self) -> array[int] | None:
        """The prompt's token ids, if another server has already rendered the messages; otherwise None."""
        return None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables that the template gets besides messages and tools. One is ``reasoning_effort``, as in vLLM. The
        effort "none" also sets ``enable_thinking`` to false, for templates that have that switch instead."""
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        return {**effort, **self.chat_template_kwargs}

    @property
    def characters(self) -> int:
        """Number of characters of the messages and the tools."""
        turns = self.messages or ()
        calls = sum(len(str(turn["tool_calls"])) for turn in turns if "tool_calls" in turn)
        texts = sum(len(turn["content"]) + len(turn.get("reasoning_content", "")) for turn in turns)
        return texts + calls + len(str(self.tools))


def template_input(conversation: Conversation, template: str | None) -> tuple[list[Turn], dict[str, Any]]:
    """Returns the messages and the other variables for a chat template: the conversation's own, or ``template`` (Jinja
    source) if the conversation has none."""
    turns, tools = _with_names(conversation.messages or []), conversation.tools
    variables = conversation.template_variables
    if conversation.chat_template is not None:
        template = conversation.chat_template
        variables = {**variables, "chat_template": template}
    if FORMATS[HARMONY].is_in(template or ""):
        turns, tools = _harmony_turns(turns), [_described(tool) for tool in tools]
    if names_tools(template):
        return turns, {"tools": tools or None, **variables}
    return describe_tools(turns, tools), variables


def describe_tools(turns: list[Turn], tools: list[dict[str, Any]]) -> list[Turn]:
    """Returns the messages for a template that does not support tools. The system message explains the tools. Calls
    become text of the assistant, in the format of ``output_schema.calls_schema``. Results of calls become user
    messages."""
    turns = [_describe_call(turn) for turn in turns]
    if not tools:
        return turns
    functions = [_json(tool["function"]) for tool in tools]
    text = "\n".join((EXPLANATION, *functions))
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _with_names(turns: list[Turn]) -> list[Turn]:
    """Returns the messages with the called tool's ``name`` in each tool message, as some templates require."""
    names = {call["id"]: call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())}
    return [
        {"name": names[turn["tool_call_id"]], **turn} if turn.get("tool_call_id") in names else turn for turn in turns
    ]


def _harmony_turns(turns: list[Turn]) -> list[Turn]:
    """Returns the messages in the form that gpt-oss's templates read. The field with the reasoning is ``thinking``.
    Each call is a message of its own, followed by its result. A message with a call has room for only one text, so the
    content before a call is appended to the reasoning."""
    groups: list[list[Turn]] = []
    group_of: dict[str, list[Turn]] = {}
    for turn in turns:
        thought = turn.get("reasoning_content", "")
        turn = {name: value for name, value in turn.items() if name != "reasoning_content"}
        if turn["role"] == "tool" and turn["tool_call_id"] in group_of:
            group_of[turn["tool_call_id"]].append(turn)
            continue
        calls = turn.get("tool_calls", ())
        if calls:
            thought, turn = "\n".join(filter(None, (thought, turn["content"]))), {**turn, "content": ""}
        first = {**turn, "thinking": thought} if thought else turn
        if not calls:
            groups.append([first])
        for number, call in enumerate(calls):
            group_of[call["id"]] = [{**(turn if number else first), "tool_calls": [call]}]
            groups.append(group_of[call["id"]])
    return list(chain.from_iterable(groups))


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """Adds an empty description to a tool without one, because gpt-oss's templates require a description."""
    return {**tool, "function": {"description": "", **tool["function"]}}


def _describe_call(turn: Turn) -> Turn:
    if turn["role"] == "tool":
        response = {"name": turn.get("name"), "content": turn["content"]}
        return {"role": "user", "content": _json({"tool_response": response})}
    if "tool_calls" not in turn:
        return turn
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = _json([{"name": function["name"], "parameters": function["arguments"]} for function in functions])
    return {"role": "assistant", "content": f"{turn['content']}\n{calls}".strip()}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
