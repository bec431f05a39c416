"""Base of the parsers of tool calls in generated text, which arrives in pieces. The parsers emit a call's name and
arguments as soon as they are known."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shadowkv.serve.text.text_reader import Reading, TextReader

INSIDE, OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')
"""Characters at which the search for the end of a JSON value stops: those inside a string, and those outside."""

ARGUMENTS = ("arguments", "parameters")
"""JSON fields that can hold a call's arguments. Hermes and Mistral use the first, Llama the second."""


def call_id() -> str:
    """Returns the id of a new call, in vLLM's form."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


@dataclass
class CallPart:
    """A part of a call, or a whole call. Only the first part has ``id`` and ``name``. The parts' ``arguments``, joined,
    are the JSON of the arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolParser(TextReader):
    """Parses one answer.

    What only looks like the start of a call is passed on as text. White space beside a call is dropped. Arguments stay
    as the model wrote them. If the answer is cut off inside arguments, the arguments end there, too.

    Args:
        new_id: makes ids of calls.
        tools: the tools that can be called, in the form that chat templates get.
    """

    def __init__(self, new_id: Callable[[], str] = call_id, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._new_id = new_id
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.calls = 0
        self._parts: list[CallPart] = []

    def push(self, text: str, last: bool = False) -> tuple[str, list[CallPart]]:
        """Takes more generated text. Returns the further output that is certain by now: text outside of calls, and at
        most one part of each call."""
        self._go_on(text, last)
        output, self._output = "".join(self._output), []
        parts, self._parts = self._parts, []
        return output, parts

    def _open(self, name: str) -> None:
        self._drop()
        self._parts.append(CallPart(self.calls, self._new_id(), name))
        self.calls += 1

    def _argue(self) -> None:
        """Emits the text that has been read as part of the last call's arguments."""
        self._write(self._text[self._begin : self._at])
        self._drop()

    def _write(self, arguments: str) -> None:
        """Emits JSON as part of the last call's arguments."""
        index = self.calls - 1
        if arguments and not (self._parts and self._parts[-1].index == index):
            self._parts.append(CallPart(index))
        if arguments:
            self._parts[-1].arguments += arguments

    def _calls(self, separator: str) -> Reading[bool]:
        """Reads all calls that come next, and the separators after them. Returns whether there was a call."""
        before = self.calls
        while (yield from self._next()) == "{" and (yield from self._call()):
            yield from self._blanks()
            yield from self._passed(separator)
            self._drop()
        return self.calls > before

    def _call(self) -> Reading[bool]:
        """Reads ``{"name": …, "arguments": {…}}``, with the fields in any order. Returns whether a call was emitted.

        What has another form is passed on as text. If the form is broken only after the call was emitted, the call
        stays.
        """
        name, arguments, is_open = None, None, False
        self._at += 1
        while True:
            yield from self._blanks()
            if (yield from self._passed(",")):
                continue
            if (yield from self._next()) == "}":
                self._at += 1
                break
            key = yield from self._string()
            if key is None or not (yield from self._colon()):
                return is_open
            begin = self._at - self._begin
            if key == "name":
                name = yield from self._string()
                if name is None:
                    return is_open
            elif key in ARGUMENTS and not is_open and arguments is None:
                if (yield from self._next()) != "{":
                    return False
                if name is not None:
                    self._open(name)
                    is_open = True
                yield from self._value(is_arguments=is_open)
                arguments = self._text[self._begin + begin : self._at]
            else:
                yield from self._value()
        if name is None or arguments is None:
            return False
        if not is_open:
            self._open(name)
            self._parts[-1].arguments = arguments
        return True

    def _colon(self) -> Reading[bool]:
        yield from self._blanks()
        return (yield from self._passed(":"))

    def _string(self) -> Reading[str | None]:
        """Reads and returns a JSON string. Returns None for anything else."""
        begin = self._at - self._begin
        if (yield from self._next()) != '"':
            return None
        yield from self._value()
        try:
            text = json.loads(self._text[self._begin + begin : self._at])
        except ValueError:
            return None
        return text if isinstance(text, str) else None

    def _value(self, is_arguments: bool = False) -> Reading[None]:
        """Reads a JSON value, or as much of it as there is. If ``is_arguments``, emits it as the last call's
        arguments."""
        depth, quoted = 0, False
        if (yield from self._next()) not in ('"', "{", "["):
            while (yield from self._next()) not in ("", ",", "}", "]"):
                self._at += 1
            return
        while True:
            mark = (INSIDE if quoted else OUTSIDE).search(self._text, self._at)
            if mark is None:
                self._at = len(self._text)
                if is_arguments:
                    self._argue()
                if self._ended:
                    return
                yield
                continue
            self._at, sign = mark.end(), mark.group()
            if sign == "\\":
                escaped = yield from self._next()
                self._at += len(escaped)
                continue
            quoted ^= sign == '"'
            depth += (sign in "{[") - (sign in "}]")
            if depth == 0 and not quoted:
                break
        if is_arguments:
            self._argue()
