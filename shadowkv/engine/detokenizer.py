"""Turns the tokens of one request into text as they arrive, and finds its stop strings."""

from __future__ import annotations

from typing import Protocol


class DecodeStream(Protocol):
    """Text of tokens one by one; never half a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """Text of one request. What might be the start of a stop string is held back until it is known not to be."""

    def __init__(self, stream: DecodeStream, stop: tuple[str, ...]) -> None:
        self._stream, self._stop = stream, stop
        self._held = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: ``stop_string``."""
        return self.stop_string is not None

    def push(self, token_id: int) -> str:
        """Text that is certain after one more token; sets ``stopped`` when a stop string is complete."""
        return self._release(self._stream.push(token_id))

    def finish(self) -> str:
        """The rest of the text, when generation has ended for another reason."""
        if self.stopped:
            return ""
        text = self._release(self._stream.flush())
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        text = self._held + text
        ends = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            place, self.stop_string = min(ends)
            self._held = ""
            return text[:place]
        keep = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest suffix of ``text`` that is a prefix of ``stop``."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if stop.startswith(text[-length:]):
                return length
        return 0
