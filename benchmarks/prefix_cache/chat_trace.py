"""A trace of chats over documents, a few of them at a time: the same for every engine that answers it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple


class TraceShape(NamedTuple):
    """``chats`` of ``turns`` turns on ``documents`` of ``shortest`` to ``longest`` tokens, ``at_once`` at a time; each
    turn adds a question of ``own`` tokens."""

    chats: int = 40
    turns: int = 4
    documents: int = 24
    shortest: int = 8192
    longest: int = 61440
    own: int = 512
    at_once: int = 4


class ChatTrace:
    """Turns in a fixed order; each chat has its next one when the previous one is answered.

    Args:
        prompt: random tokens, of a given number, with one draw of the generator for each.

    Attributes:
        lengths: of the documents, in tokens.
    """

    def __init__(self, shape: TraceShape, prompt: Callable[[int, random.Random], list[int]]) -> None:
        self._shape, self._prompt, self._draw = shape, prompt, random.Random(0)
        self.lengths = [self._draw.randrange(shape.shortest, shape.longest + 1) for _ in range(shape.documents)]
        documents = [prompt(length, self._draw) for length in self.lengths]
        self._histories = [list(documents[number % shape.documents]) for number in range(shape.chats)]
        chats = range(shape.chats)
        self._order = [chat for _ in range(shape.turns) for chat in self._draw.sample(chats, shape.chats)]
        self._busy: set[int] = set()

    def due(self) -> Iterator[tuple[int, list[int]]]:
        """Chats with a turn due, and its prompt: all that was said before, and a question."""
        while len(self._busy) < self._shape.at_once:
            chat = next((number for number in self._order if number not in self._busy), None)
            if chat is None:
                return
            self._order.remove(chat)
            self._busy.add(chat)
            self._histories[chat] += self._prompt(self._shape.own, self._draw)
            yield chat, list(self._histories[chat])

    def came(self, chat: int, tokens: list[int], ended: bool) -> None:
        """Records tokens of an answer."""
        self._histories[chat] += tokens
        if ended:
            self._busy.remove(chat)
