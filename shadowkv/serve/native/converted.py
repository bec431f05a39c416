"""Bodies that express a completion differently: each is converted to a ``NativeCompletion`` when it is read."""

from __future__ import annotations

from shadowkv.serve.openai.converted import Converted
from shadowkv.serve.openai.protocol import CompletionRequest, TextRequest


class NativeCompletion(CompletionRequest):
    """A completion whose default length is the number of tokens that the server reserves.

    Attributes:
        pieces: for each prompt, the number of items of ``prompt`` that form it; empty if each item is a prompt.
    """

    pieces: tuple[int, ...] = ()

    def limit(self, room: int | None) -> int | None:
        return self.max_tokens


class NativeRequest(Converted, TextRequest):
    """A body that is converted to a completion."""

    target = NativeCompletion
