"""Text from tokens as they are generated, never ending in the middle of a character."""

from __future__ import annotations

from collections.abc import Callable

_REPLACEMENT = "\ufffd"
_MAX_HELD = 32
"""Most tokens held back; a character has 4 bytes, so only text that is not UTF-8, or no text at all, gets this far."""


class DecodeStream:
    """Incremental detokeniser of one sequence.

    A tokeniser's decoder depends on neighbours (a leading space, the bytes of one character), so a token is decoded
    after the ones last emitted, and held back while the text ends in an incomplete character.

    Args:
        decode: token ids -> text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that the token completes, possibly empty."""
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The text held back, with incomplete characters replaced; for the end of the sequence."""
        return self._emit(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

    def _emit(self, text: str) -> str:
        if text:
            self._context, self._held = self._held, []
        elif len(self._held) >= _MAX_HELD:
            self._held = []  # tokens without text, such as skipped special ones
        return text
