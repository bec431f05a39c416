"""A trace of chats over documents, a few chats at a time. It is the same for every engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple


class TraceShape(NamedTuple):
    """``chats`` chats of ``turns`` turns each, about ``documents`` documents of ``shortest`` to ``longest`` tokens.
    ``at_once`` chats run at a time. Each turn adds a question of ``own`` tokens."""

    chats: int = 40
    turns: int = 4
    documents: int = 24
    shortest: int = 8192
    longest: int = 61440
    own: int = 512
    at_once: int = 4


class ChatTrace:
    """The turns of all chats, in a fixed order. A chat's next turn is due only after the previous one is answered.

    Args:
        prompt: returns a given number of random tokens. It must draw from the generator once per token.

    Attributes:
        lengths: lengths of the documents in tokens.
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
        """Yields the chats whose next turn is due, with the turn's prompt: the chat so far, and a new question."""
        while len(self._busy) < self._shape.at_once:
            chat = next((number for number in self._order if number not in self._busy), None)
            if chat is None:
                return
            self._order.remove(chat)
            self._busy.add(chat)
            self._histories[chat] += self._prompt(self._shape.own, self._draw)
            yield chat, list(self._histories[chat])

    def came(self, chat: int, tokens: list[int], ended: bool) -> None:
        """Adds tokens of a chat's answer. ``ended`` says whether the answer is complete."""
        self._histories[chat] += tokens
        if ended:
            self._busy.remove(chat)
