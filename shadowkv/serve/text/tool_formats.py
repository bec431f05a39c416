"""How models write tool calls, by vLLM's names in ``--tool-call-parser``, and how chat templates reveal the format."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from shadowkv.serve.text.harmony import Harmony, HarmonyReasoning, opening
from shadowkv.serve.text.reasoning import TAGGED, ReasoningParser
from shadowkv.serve.text.tagged_calls import Glm45, MinimaxM2, Qwen3Coder
from shadowkv.serve.text.text_reader import Reading
from shadowkv.serve.text.tool_parser import ToolParser, call_id

MISTRAL_ID_CHARS = 9

HARMONY, HARMONY_THOUGHTS = "openai", "openai_gptoss"
"""vLLM's names of gpt-oss's format, in ``--tool-call-parser`` and in ``--reasoning-parser``."""


class Hermes(ToolParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, of Hermes, Qwen2.5 and Qwen3; Qwen2.5-Coder begins an
    answer with a code block of the same instead, which llama.cpp reads, too."""

    def _read(self) -> Reading[None]:
        yield from self._blanks()
        if (yield from self._passed("```json")) and (yield from self._calls(",")):
            yield from self._passed("```")
            self._drop()
        else:
            self._at = self._begin  # it is text
        while (yield from self._until("<tool_call>")):
            yield from self._passed("<tool_call>")
            if not (yield from self._calls(",")):
                self._say()
                continue
            yield from self._passed("</tool_call>")
            self._drop()


class Llama3Json(ToolParser):
    """An answer that is ``{"name": …, "parameters": {…}}``, or several with semicolons between, of Llama 3.1 to 3.3."""

    def _read(self) -> Reading[None]:
        yield from self._blanks()
        yield from self._passed("<|python_tag|>")
        yield from self._calls(";")
        yield from self._rest()


class Mistral(ToolParser):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` of newer tokenisers."""

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
    """A JSON list of ``{"name": …, "parameters": {…}}``: what ``tool_choice`` "required" makes every model write. None
    of it is text: an answer that is cut off before a call's arguments has no more calls."""

    def _read(self) -> Reading[None]:
        yield from self._blanks()
        yield from self._passed("[")
        yield from self._calls(",")


class Generic(ToolParser):
    """A JSON list of ``{"name": …, "parameters": {…}}``, or one such object, which may be in a code block: what models
    write whose templates know no tools, and which are told of them in words. Anything else is text."""

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
    """The arguments of one function and nothing else: what a ``tool_choice`` that names it makes every model write.

    Args:
        name: the function.
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
    """A new call's id, in the form that Mistral's templates require of earlier turns."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(MISTRAL_ID_CHARS))


@dataclass(frozen=True)
class ToolFormat:
    """One format of calls.

    Attributes:
        parser: reads the format.
        signs: all of these in a chat template show that the model writes it.
        others: signs of formats that share these but are written differently.
        new_id: makes ids of calls.
        reasoning: reads the thoughts, where they are told apart by the same marks: then an answer is read even if there
            are no tools, and special tokens are part of what is read.
        opening: what has to come between a prompt, whose end it gets, and an answer that follows a schema.
    """

    parser: type[ToolParser]
    signs: tuple[str, ...]
    others: tuple[str, ...] = ()
    new_id: Callable[[], str] = call_id
    reasoning: type[ReasoningParser] | None = None
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
    HARMONY: ToolFormat(Harmony, ("<|channel|>analysis<|message|>",), reasoning=HarmonyReasoning, opening=opening),
}

GENERIC = ToolFormat(Generic, ())
"""How models write calls whose chat template has no place for tools: as the system message asks them to."""

REASONING_PARSERS = (*TAGGED, HARMONY_THOUGHTS)


def tool_format(name: str | None, template: str | None) -> ToolFormat | None:
    """The format with a name, or without one the chat template's; None if it has tools in an unknown format."""
    if name is not None:
        return FORMATS[name]
    others = None if names_tools(template) else GENERIC
    return next((known for known in FORMATS.values() if known.is_in(template or "")), others)


def names_tools(template: str | None) -> bool:
    """Whether a chat template (Jinja source) has a place for tools."""
    return "tool" in (template or "")
