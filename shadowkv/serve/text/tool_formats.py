"""Formats of tool calls, under vLLM's names in ``--tool-call-parser``, and their detection from chat templates."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from shadowkv.serve.text.gemma4 import BEGIN, Gemma4, Gemma4Reasoning
from shadowkv.serve.text.harmony import Harmony, HarmonyReasoning, opening
from shadowkv.serve.text.reasoning import TAGGED, ReasoningParser
from shadowkv.serve.text.tagged_calls import Glm45, MinimaxM2, Qwen3Coder
from shadowkv.serve.text.text_reader import Reading
from shadowkv.serve.text.tool_parser import ToolParser, call_id

MISTRAL_ID_CHARS = 9

HARMONY, HARMONY_THOUGHTS = "openai", "openai_gptoss"
"""Values of vLLM's ``--tool-call-parser`` and ``--reasoning-parser`` for the format of gpt-oss."""


class Hermes(ToolParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, the format of Hermes, Qwen2.5 and Qwen3. Qwen2.5-Coder
    instead begins an answer with a code block that holds the call. This is read, too, as in llama.cpp."""

    def _read(self) -> Reading[None]:
        yield from self._blanks()
        if (yield from self._passed("```json")) and (yield from self._calls(",")):
            yield from self._passed("```")
            self._drop()
        else:
            self._at = self._begin  # the answer does not begin with a call
        while (yield from self._until("<tool_call>")):
            yield from self._passed("<tool_call>")
            if not (yield from self._calls(",")):
                self._say()
                continue
            yield from self._passed("</tool_call>")
            self._drop()


class Llama3Json(ToolParser):
    """The format of Llama 3.1 to 3.3. The answer is ``{"name": …, "parameters": {…}}``, or several of these separated
    by semicolons."""

    def _read(self) -> Reading[None]:
        yield from self._blanks()
        yield from self._passed("<|python_tag|>")
        yield from self._calls(";")
        yield from self._rest()


class Mistral(ToolParser):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` with newer tokenizers."""

    def _read(self) -> Reading[None]:
        while (yield from self._until("[TOOL_CALLS]")):
            yield from self._passed("[TOOL_CALLS]")
            if (yield from self._passed("[")):
                is_call = yield from self._calls(",")
                if is_call:
                    yield from self._passed("]")
            else:
                is_call = yield from self._named()
            if is_call:
                self._drop()
            else:
                self._say()

    def _named(self) -> Reading[bool]:
        begin = self._at - self._begin
        while (yield from self._next()) not in ("", "{", "["):
            self._at += 1
        name = self._text[self._begin + begin : self._at].strip()
        yield from self._passed("[ARGS]")
        if not name or (yield from self._next()) != "{":
            return False
        self._open(name)
        yield from self._value(is_arguments=True)
        yield from self._blanks()
        return True


class Listed(ToolParser):
    """A JSON list of ``{"name": …, "parameters": {…}}``. With ``tool_choice`` "required", every model must write one.
    No part of it is text. If the answer ends before a call's arguments, that call is dropped."""

    def _read(self) -> Reading[None]:
        yield from self._blanks()
        yield from self._passed("[")
        yield from self._calls(",")


class Generic(ToolParser):
    """A JSON list of ``{"name": …, "parameters": {…}}`` or one such object, possibly in a code block. Anything else is
    text. The format is for models whose chat templates have no tools: the system message explains the tools and the
    format."""

    def _read(self) -> Reading[None]:
        yield from self._blanks()
        fenced = (yield from self._passed("```json")) or (yield from self._passed("```"))
        listed = yield from self._passed("[")
        if (yield from self._calls(",")):
            if listed:
                yield from self._passed("]")
            if fenced:
                yield from self._passed("```")
            self._drop()
        yield from self._rest()


class Named(ToolParser):
    """The arguments of one function and nothing else. With a ``tool_choice`` that names the function, every model must
    write these.

    Args:
        name: the function's name.
    """

    def __init__(self, name: str, new_id: Callable[[], str] = call_id) -> None:
        super().__init__(new_id)
        self._name = name

    def _read(self) -> Reading[None]:
        self._open(self._name)
        while True:
            self._at = len(self._text)
            self._argue()
            if self._ended:
                return
            yield


def mistral_id() -> str:
    """Returns the id of a new call: nine letters and digits. Mistral's chat templates require ids of this form."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(MISTRAL_ID_CHARS))


@dataclass(frozen=True)
class ToolFormat:
    """One format of tool calls.

    Attributes:
        parser: the parser of the format.
        signs: strings that a chat template contains if the model writes this format.
        others: strings of other formats that have the same signs. A template with one of these strings does not have
            this format.
        new_id: makes ids of calls.
        reasoning: the format's reasoning parser, if the format has marks of its own for reasoning. Answers are then
            parsed even without tools, and special tokens are part of the parsed text.
        thoughts: vLLM's name of ``reasoning`` in ``--reasoning-parser``.
        opening: for answers that must follow a schema: a function that takes the end of the prompt and returns the text
            to append to the prompt.
    """

    parser: type[ToolParser]
    signs: tuple[str, ...]
    others: tuple[str, ...] = ()
    new_id: Callable[[], str] = call_id
    reasoning: type[ReasoningParser] | None = None
    thoughts: str | None = None
    opening: Callable[[str], str] | None = None

    def is_in(self, template: str) -> bool:
        """Whether a chat template (Jinja source) makes the model write this format."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.others)


_QWEN3_CODER = ToolFormat(Qwen3Coder, ("<tool_call>", "<function=", "<parameter="))
_GLM45 = ToolFormat(Glm45, ("<tool_call>", "<arg_key>", "<arg_value>"))

FORMATS = {
    "hermes": ToolFormat(Hermes, ("<tool_call>",), ("<arg_key>", "<function=")),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "glm45": _GLM45,
    "glm47": _GLM45,
    "minimax_m2": ToolFormat(MinimaxM2, ("<minimax:tool_call>", "<invoke name=", "<parameter name=")),
    "llama3_json": ToolFormat(Llama3Json, ('{"name": function name, "parameters":',)),
    "mistral": ToolFormat(Mistral, ("[TOOL_CALLS]",), new_id=mistral_id),
    HARMONY: ToolFormat(
        Harmony,
        ("<|channel|>analysis<|message|>",),
        reasoning=HarmonyReasoning,
        thoughts=HARMONY_THOUGHTS,
        opening=opening,
    ),
    "gemma4": ToolFormat(Gemma4, (BEGIN,), reasoning=Gemma4Reasoning, thoughts="gemma4"),
}

GENERIC = ToolFormat(Generic, ())
"""The format for chat templates without tools: the system message asks models to write it."""

OF_FORMATS = {known.thoughts: name for name, known in FORMATS.items() if known.thoughts is not None}
"""Maps vLLM's names of reasoning parsers to names of formats, for formats with their own reasoning parser."""

REASONING_PARSERS = (*TAGGED, *OF_FORMATS)


def tool_format(name: str | None, template: str | None) -> ToolFormat | None:
    """Returns the format with a name. Without a name, returns the format that the chat template shows: ``GENERIC`` if
    the template has no tools, None if it has tools in an unknown format."""
    if name is not None:
        return FORMATS[name]
    others = None if names_tools(template) else GENERIC
    return next((known for known in FORMATS.values() if known.is_in(template or "")), others)


def names_tools(template: str | None) -> bool:
    """Whether a chat template (Jinja source) mentions tools."""
    return "tool" in (template or "")
