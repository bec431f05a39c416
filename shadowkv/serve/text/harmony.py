"""gpt-oss's answers: messages of their own, each with a channel for what it is, in the format called Harmony.

``<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>arguments<|call|>``: the prompt ends with ``<|start|>assistant``, and the token that ends
the answer (``<|return|>`` or ``<|call|>``) is no part of its text. Thoughts and calls have a reader each; the first
leaves to the second what is not its own, as it was written.
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
"""What a message's text ends before."""

HEADERS = (START, "<|channel|>", "<|constrain|>", MESSAGE, " to=")
"""What a message's header begins with; anything else is text already."""

CHANNEL, RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")

FINAL = f"<|channel|>final{MESSAGE}"
"""Header of an answer's text."""

FUNCTIONS = "functions."
"""What recipients that are functions of the client begin with."""


def opening(prompt: str) -> str:
    """What has to come before an answer that is text from its first token on, at this end of a prompt."""
    return "" if prompt.endswith(MESSAGE) else FINAL


@dataclass(frozen=True)
class Header:
    """Of one message.

    Attributes:
        channel: ``analysis``, ``commentary`` or ``final``.
        function: the name of the one that is called with the message.
    """

    channel: str
    function: str | None = None

    @classmethod
    def of(cls, text: str) -> Header:
        """The header that a text is."""
        channel, recipient = CHANNEL.search(text), RECIPIENT.search(text)
        named = "" if recipient is None else recipient[1]
        function = named.removeprefix(FUNCTIONS) if named.startswith(FUNCTIONS) else None
        return cls("final" if channel is None else channel[1], function or None)


class Messages(TextReader):
    """Reads an answer message by message."""

    def _header(self) -> Reading[Header | None]:
        """Reads the header of the next message; None where the answer ends before its text."""
        for beginning in HEADERS:
            if (yield from self._sees(beginning)):
                break
        else:
            return None if self._ended and self._at == len(self._text) else Header("final")
        while (place := self._text.find(MESSAGE, self._at)) < 0:
            if self._ended and not beginning.startswith("<"):  # two words of a text
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
        """Reads what ends a message."""
        for stop in STOPS:
            if (yield from self._sees(stop)):
                self._at += len(stop)
                return


class HarmonyReasoning(Messages, ReasoningParser):
    """Thoughts: the messages of the channel ``analysis``, a line end between them. Calls of functions are left where
    they are."""

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        last = prompt.rpartition(START)[2]
        self._is_open = last.endswith(MESSAGE) and Header.of(last).channel == "analysis"

    def _read(self) -> Reading[None]:
        thoughts, header = 0, Header("analysis") if self._is_open else (yield from self._header())
        while header is not None:
            is_thought = header.channel == "analysis" and header.function is None
            self._said = self._thought if is_thought else self._answer
            if is_thought:
                self._drop()
                self._said += ["\n"] * bool(thoughts)
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
    """Calls: messages to functions, in whichever channel, where there are tools. All others are text, a line end
    between them: the channel ``commentary`` is what a model says before a call, and ``final`` its answer."""

    def _read(self) -> Reading[None]:
        texts = 0
        while (header := (yield from self._header())) is not None:
            self._drop()
            if header.function is not None and self._functions:
                self._open(header.function)
                is_whole = yield from self._until(*ENDS, emit=self._argue)
            else:
                self._said += ["\n"] * bool(texts)
                texts += 1
                is_whole = yield from self._until(*ENDS)
            if not is_whole:
                return
            yield from self._stop()
            self._drop()
