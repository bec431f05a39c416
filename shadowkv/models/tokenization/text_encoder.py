"""Token ids of texts by the tokenizers library, piece by piece, so that memory does not grow with the text; and errors
in place of its panics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from threading import Event

import tokenizers

from shadowkv.models.tokenization.text_form import PIECE_CHARS, TextForm

SAMPLE_CHARS = 64
"""Of a text, by which the special tokens around all texts are found."""


class TokenizerPanic(RuntimeError):
    """The tokenizers library has met what it does not expect, such as a pattern of the tokeniser that never ends."""


class NobodyWaits(Exception):
    """A text was not tokenised to its end, as its token ids are of no use any more."""


_unwanted: ContextVar[Event | None] = ContextVar("unwanted", default=None)


@contextmanager
def unless_set(unwanted: Event) -> Iterator[None]:
    """Within, long texts are tokenised until the event is set: then NobodyWaits is raised between two pieces."""
    before = _unwanted.set(unwanted)
    try:
        yield
    finally:
        _unwanted.reset(before)


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic of the library, whose type cannot be imported and is no ``Exception``."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turns a panic of the library into a TokenizerPanic."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise TokenizerPanic(f"the tokenizers library has panicked: {error}") from error


class TextEncoder:
    """Makes token ids of texts.

    Args:
        backend: the tokenizers library's tokeniser.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend

    @cached_property
    def form(self) -> TextForm:
        """What is known of all texts."""
        return TextForm.of(self.backend)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; raises TokenizerPanic, and ValueError for what no tokeniser takes."""
        if len(text) <= PIECE_CHARS:
            return self._ids(text, add_special_tokens)
        frame: tuple[list[int], list[int]] | None = ([], [])
        if add_special_tokens:
            frame = self._frame(text[:SAMPLE_CHARS]) or self._frame("a")  # blanks alone may be no tokens
        if frame is None:
            return self._ids(text, add_special_tokens)
        before, after = frame
        ids = before.copy()
        unwanted = _unwanted.get()
        for piece in self.form.pieces(text):
            if unwanted is not None and unwanted.is_set():
                raise NobodyWaits
            ids += self._ids(piece, False)
        return ids + after

    def _frame(self, sample: str) -> tuple[list[int], list[int]] | None:
        """The special tokens before and after every text; None where a sample does not show them."""
        plain, framed = self._ids(sample, False), self._ids(sample, True)
        for at in range(len(framed)):
            if plain and framed[at : at + len(plain)] == plain:
                return framed[:at], framed[at + len(plain) :]
        return None

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # encode() holds the interpreter's lock for the whole text, 0.2 s at 100K tokens; batches release it. The fast
        # one takes half the time and memory: it does not track which characters a token has.
        with panics_as_errors():
            return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
