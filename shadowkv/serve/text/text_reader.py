"""Reads text that arrives in pieces: the result does not depend on where pieces end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""Reads on and returns a T; yields where more text is needed."""


class TextReader(ABC):
    """Reads one answer, from beginning to end."""

    def __init__(self) -> None:
        self._text, self._ended = "", False
        self._begin = self._at = 0  # what has been read and not yet emitted lies between
        self._said: list[str] = []
        self._steps = self._read()

    def _go_on(self, text: str, last: bool) -> None:
        """Reads more text as far as possible."""
        self._text, self._at = self._text[self._begin :] + text, self._at - self._begin
        self._begin, self._ended = 0, last
        next(self._steps, None)

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Reads an answer to its end."""

    def _say(self) -> None:
        """Emits what was read as text."""
        self._said.append(self._text[self._begin : self._at])
        self._begin = self._at

    def _drop(self) -> None:
        """Drops what was read: it is emitted in another form, or not at all."""
        self._begin = self._at

    def _next(self) -> Reading[str]:
        """The next character, without consuming it; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def _blanks(self) -> Reading[None]:
        while (yield from self._next()).isspace():
            self._at += 1

    def _passed(self, literal: str) -> Reading[bool]:
        """Reads ``literal`` if it comes next, and any white space after it."""
        while not self._ended and len(rest := self._text[self._at :]) < len(literal) and literal.startswith(rest):
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        yield from self._blanks()
        return True

    def _until(self, mark: str) -> Reading[bool]:
        """Emits the text up to ``mark``, without white space before it; False if it does not come."""
        while True:
            place = self._text.find(mark, self._at)
            end = place if place >= 0 else len(self._text) - (0 if self._ended else self._overlap(mark))
            if place >= 0 or not self._ended:
                end = self._at + len(self._text[self._at : end].rstrip())
            self._at = end
            self._say()
            if place >= 0:
                self._at = place
                return True
            if self._ended:
                return False
            yield

    def _overlap(self, mark: str) -> int:
        """Length of the longest suffix of the text that is a prefix of ``mark``."""
        sizes = range(min(len(mark) - 1, len(self._text) - self._at), 0, -1)
        return next((size for size in sizes if self._text.endswith(mark[:size])), 0)

    def _rest(self) -> Reading[None]:
        """Emits all that follows as text."""
        while True:
            self._at = len(self._text)
            self._say()
            if self._ended:
                return
            yield
