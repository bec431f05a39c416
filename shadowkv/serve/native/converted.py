"""Base of the bodies with which other engines' APIs ask for a completion. Such a body is converted to a
``NativeCompletion`` when it is read."""

from __future__ import annotations

from shadowkv.serve.openai.converted import Converted
from shadowkv.serve.openai.protocol import CompletionRequest, TextRequest


class NativeCompletion(CompletionRequest):
    """A completion. Its default ``max_tokens`` is the server's, not 16 as in the OpenAI API.

    Attributes:
        pieces: for each prompt, the number of consecutive items of ``prompt`` that form it. Empty if each item is a
            prompt.
    """

    pieces: tuple[int, ...] = ()

    def limit(self, room: int | None) -> int | None:
        return self.max_tokens


class NativeRequest(Converted, TextRequest):
    """A body that is converted to a completion."""

    target = NativeCompletion
