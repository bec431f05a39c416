"""Parsers of Gemma 4's answers. An answer begins with its reasoning, between ``<|channel>thought`` and ``<channel|>``.
Text and tool calls follow."""

from __future__ import annotations

import json

from shadowkv.serve.text.argument_values import ANYTHING, json_value
from shadowkv.serve.text.reasoning import ReasoningParser
from shadowkv.serve.text.text_reader import Reading
from shadowkv.serve.text.tool_parser import ToolParser

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
"""Marks at the beginning of a call, at its end, and on both sides of a string."""

NOT_IN_NAMES, AFTER_KEYS, AFTER_VALUES = "{}<> \t\r\n", ":,{}[]", ",}]"
"""Characters that end a function's name, those that end a key, and those that end a value without quotes."""


class Gemma4Reasoning(ReasoningParser):
    """Extracts reasoning. The prompt can end with an empty block of reasoning, so that the model does not think."""

    begin, end = "<|channel>thought", "<channel|>"


class Gemma4(ToolParser):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:1,list:[…]}<tool_call|>``. Keys are plain text, and strings are
    between marks (``QUOTE``). Arguments are converted to JSON while they arrive. If the answer ends inside a number or
    a word, that value is left out."""

    def _read(self) -> Reading[None]:
        while (yield from self._until(BEGIN)):
            yield from self._passed(BEGIN)
            if not (yield from self._function()):
                self._say()
                continue
            yield from self._blanks()
            yield from self._passed(END)
            self._drop()

    def _function(self) -> Reading[bool]:
        """Reads a call between its marks. Returns False if the text is not a call."""
        if not (yield from self._passed("call:")):
            return False
        name = yield from self._up_to(NOT_IN_NAMES)
        if not name or (yield from self._next()) != "{":
            return False
        self._open(name)
        yield from self._arguments()
        return True

    def _arguments(self) -> Reading[None]:
        """Reads the arguments, and emits their JSON."""
        # ``levels`` has the closing marks of open objects and lists. ``before`` is JSON to write before the next value.
        levels, before = list[str](), ""
        while True:
            yield from self._blanks()
            sign = yield from self._next()
            if sign == "" or (sign in "}]" and (not levels or sign != levels[-1])):
                return
            if sign == ",":
                self._at += 1
                continue
            if sign in "}]":
                self._emit(levels.pop())
                if not levels:
                    return
                before = ", "
                continue
            if levels and levels[-1] == "}":
                key = yield from self._key()
                if key is None:
                    return
                before += f"{json.dumps(key, ensure_ascii=False)}: "
                sign = yield from self._next()
            if sign and sign in "{[":
                levels.append("}" if sign == "{" else "]")
                self._emit(before + sign)
                before = ""
                continue
            if not (yield from self._plain(before)):
                return
            before = ", "

    def _emit(self, written: str) -> None:
        """Reads one character, and emits ``written`` for it as JSON."""
        self._at += 1
        self._write(written)
        self._drop()

    def _key(self) -> Reading[str | None]:
        """Reads a key and the colon after it. Returns the key, or None if no colon follows."""
        if (yield from self._passed(QUOTE)):
            key = yield from self._up_to("<")
            yield from self._passed(QUOTE)
        else:
            key = (yield from self._up_to(AFTER_KEYS)).strip()
        return key if (yield from self._passed(":")) else None

    def _plain(self, before: str) -> Reading[bool]:
        """Reads a string, number or word, and emits ``before`` and the value's JSON. Returns whether the value was
        complete."""
        if not (yield from self._sees(QUOTE)):
            value = yield from self._up_to(AFTER_VALUES)
            if (yield from self._next()) == "":
                return False
            self._write(before + json_value(value.strip(), ANYTHING))
            self._drop()
            return True
        self._at += len(QUOTE)
        self._drop()
        self._write(f'{before}"')
        while True:
            place = self._text.find(QUOTE, self._at)
            self._at = place if place >= 0 else len(self._text) - self._overlap(QUOTE)
            self._write(json.dumps(self._text[self._begin : self._at], ensure_ascii=False)[1:-1])
            self._drop()
            if place >= 0:
                self._at += len(QUOTE)
                self._drop()
                self._write('"')
                return True
            if self._ended:  # the rest of the text is left out, as it may be the beginning of the mark
                self._at = len(self._text)
                return False
            yield
