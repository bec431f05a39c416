"""Parsers of Harmony, the answer format of gpt-oss: several messages, each with a channel that shows its purpose.

An example: ``<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>arguments<|call|>``. The prompt ends with ``<|start|>assistant``. The token that ends the
answer (``<|return|>`` or ``<|call|>``) is not part of its text. The reasoning parser runs first and passes everything
but reasoning on to the tool parser, unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shadowkv.serve.text.reasoning import ReasoningParser
from shadowkv.serve.text.text_reader import Reading, TextReader
from shadowkv.serve.text.tool_parser import ToolParser

START, MESSAGE = "<|start|>", "<|message|>"

STOPS = ("<|end|>", "<|call|>", "<|return|>")
ENDS = (*STOPS, START)
"""Marks that end a message's text."""

HEADERS = (START, "<|channel|>", "<|constrain|>", MESSAGE, " to=")
"""Marks that can begin a message's header. If none of them comes first, the message is text without a header."""

CHANNEL, RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")

FINAL = f"<|channel|>final{MESSAGE}"
"""Header of the final answer's text."""

FUNCTIONS = "functions."
"""Prefix of recipients that are functions of the client."""


def opening(prompt: str) -> str:
    """Returns the text to append to a prompt so that the answer is plain text from its first token on. ``prompt`` is
    the prompt's end."""
    return "" if prompt.endswith(MESSAGE) else FINAL


@dataclass(frozen=True)
class Header:
    """The header of one message.

    Attributes:
        channel: ``analysis``, ``commentary`` or ``final``.
        function: name of the client's function that the message calls; None if it calls none.
    """

    channel: str
    function: str | None = None

    @classmethod
    def of(cls, text: str) -> Header:
        """Parses the text of a header."""
        channel, recipient = CHANNEL.search(text), RECIPIENT.search(text)
        named = "" if recipient is None else recipient[1]
        function = named.removeprefix(FUNCTIONS) if named.startswith(FUNCTIONS) else None
        return cls("final" if channel is None else channel[1], function or None)


class Messages(TextReader):
    """Base of the parsers: reads an answer message by message."""

    def _header(self) -> Reading[Header | None]:
        """Reads and returns the header of the next message. Returns None if the answer ends before that message's text
        begins."""
        for beginning in HEADERS:
            if (yield from self._sees(beginning)):
                break
        else:
            return None if self._ended and self._at == len(self._text) else Header("final")
        while (place := self._text.find(MESSAGE, self._at)) < 0:
            if self._ended and not beginning.startswith("<"):  # no header: the text itself begins with " to="
                self._at = self._begin
                return Header("final")
            self._at = len(self._text) - (0 if self._ended else self._overlap(MESSAGE))
            if self._ended:
                self._drop()
                return None
            yield
        self._at = place + len(MESSAGE)
        return Header.of(self._text[self._begin : self._at])

    def _stop(self) -> Reading[None]:
        """Reads the mark that ends a message."""
        for stop in STOPS:
            if (yield from self._sees(stop)):
                self._at += len(stop)
                return


class HarmonyReasoning(Messages, ReasoningParser):
    """Extracts reasoning: the messages of the channel ``analysis``, joined by line ends. Calls of functions stay in the
    answer's text, also those in this channel."""

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        last = prompt.rpartition(START)[2]
        self._is_open = last.endswith(MESSAGE) and Header.of(last).channel == "analysis"

    def _read(self) -> Reading[None]:
        thoughts, header = 0, Header("analysis") if self._is_open else (yield from self._header())
        while header is not None:
            is_thought = header.channel == "analysis" and header.function is None
            self._output = self._thought if is_thought else self._answer
            if is_thought:
                self._drop()
                self._output += ["\n"] * bool(thoughts)
                thoughts += 1
            else:
                self._say()
            if not (yield from self._until(*ENDS)):
                return
            yield from self._stop()
            if is_thought:
                self._drop()
            else:
                self._say()
            header = yield from self._header()


class Harmony(Messages, ToolParser):
    """Extracts tool calls. If there are tools, messages to functions are calls, whatever their channel. All other
    messages are text, joined by line ends: ``commentary`` is what the model says before a call, ``final`` is its
    answer."""

    def _read(self) -> Reading[None]:
        texts = 0
        while (header := (yield from self._header())) is not None:
            self._drop()
            if header.function is not None and self._functions:
                self._open(header.function)
                is_whole = yield from self._until(*ENDS, emit=self._argue)
            else:
                self._output += ["\n"] * bool(texts)
                texts += 1
                is_whole = yield from self._until(*ENDS)
            if not is_whole:
                return
            yield from self._stop()
            self._drop()
