"""Base of the parsers of generated text. The text arrives in pieces. The result does not depend on where pieces end."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A generator that reads text and returns a value of type ``T``. It yields when it needs more text."""


class TextReader(ABC):
    """Parses one answer, from beginning to end."""

    def __init__(self) -> None:
        self._text, self._ended = "", False
        self._begin = self._at = 0  # text from _begin to _at has been read, but not yet emitted
        self._output: list[str] = []
        self._steps = self._read()

    def _go_on(self, text: str, last: bool) -> None:
        """Parses more text, as far as possible. ``last`` says that the answer ends with this text."""
        self._text, self._at = self._text[self._begin :] + text, self._at - self._begin
        self._begin, self._ended = 0, last
        next(self._steps, None)

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Reads an answer to its end."""

    def _say(self) -> None:
        """Emits the text that has been read."""
        self._output.append(self._text[self._begin : self._at])
        self._begin = self._at

    def _drop(self) -> None:
        """Drops the text that has been read: it is emitted in another form, or not at all."""
        self._begin = self._at

    def _next(self) -> Reading[str]:
        """Returns the next character without consuming it; an empty string at the end of the answer."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def _blanks(self) -> Reading[None]:
        while (yield from self._next()).isspace():
            self._at += 1

    def _sees(self, literal: str) -> Reading[bool]:
        """Returns whether ``literal`` comes next, without consuming it."""
        size = len(literal)
        while not self._ended and len(rest := self._text[self._at : self._at + size]) < size:
            if not literal.startswith(rest):
                return False
            yield
        return self._text.startswith(literal, self._at)

    def _passed(self, literal: str) -> Reading[bool]:
        """If ``literal`` comes next, reads it and any white space after it. Returns whether ``literal`` came next."""
        if not (yield from self._sees(literal)):
            return False
        self._at += len(literal)
        yield from self._blanks()
        return True

    def _up_to(self, ends: str) -> Reading[str]:
        """Reads up to a character of ``ends`` or the end of the answer, and returns what it has read."""
        begin = self._at - self._begin
        while (yield from self._next()) and self._text[self._at] not in ends:
            self._at += 1
        return self._text[self._begin + begin : self._at]

    def _until(self, *marks: str, emit: Callable[[], None] | None = None) -> Reading[bool]:
        """Emits the text up to the first of ``marks``, without the white space before that mark. Returns whether there
        is a mark.

        Args:
            emit: function that emits the text that has been read. By default it is emitted as plain text.
        """
        pattern = "|".join(map(re.escape, marks))
        while True:
            found = re.compile(pattern).search(self._text, self._at)
            place = -1 if found is None else found.start()
            end = place if place >= 0 else len(self._text) - (0 if self._ended else self._overlap(*marks))
            if place >= 0 or not self._ended:
                end = self._at + len(self._text[self._at : end].rstrip())
            self._at = end
            (emit or self._say)()
            if place >= 0:
                self._at = place
                return True
            if self._ended:
                return False
            yield

    def _overlap(self, *marks: str) -> int:
        """Returns the length of the longest suffix of the text that is a prefix of one of ``marks``."""
        longest = 0
        for mark in marks:
            sizes = range(min(len(mark) - 1, len(self._text) - self._at), longest, -1)
            longest = next((size for size in sizes if self._text.endswith(mark[:size])), longest)
        return longest

    def _rest(self) -> Reading[None]:
        """Emits the rest of the answer as text."""
        while True:
            self._at = len(self._text)
            self._say()
            if self._ended:
                return
            yield
