"""Encodes texts with the tokenizers library. Long texts are encoded in pieces, so that memory does not grow with the
text; the library's panics become errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from threading import Event

import tokenizers

from shadowkv.models.tokenization.text_form import PIECE_CHARS, TextForm

SAMPLE_CHARS = 64
"""Number of characters that are encoded to find the special tokens that surround every text."""


class TokenizerPanic(RuntimeError):
    """The tokenizers library has panicked, for example because a pattern of the tokenizer never ends."""


class NobodyWaits(Exception):
    """The encoding of a text was stopped, because its caller was cancelled."""


_unwanted: ContextVar[Event | None] = ContextVar("unwanted", default=None)


@contextmanager
def unless_set(unwanted: Event) -> Iterator[None]:
    """A context in which the encoding of long texts stops when the event is set: NobodyWaits is raised between two
    pieces."""
    before = _unwanted.set(unwanted)
    try:
        yield
    finally:
        _unwanted.reset(before)


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic of the library; the panic's type cannot be imported and is not an
    ``Exception``."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """A context that turns a panic of the library into a TokenizerPanic."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise TokenizerPanic(f"the tokenizers library has panicked: {error}") from error


class TextEncoder:
    """Encodes texts.

    Args:
        backend: the tokenizers library's tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend

    @cached_property
    def form(self) -> TextForm:
        """Properties that all texts of this tokenizer have."""
        return TextForm.of(self.backend)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; raises TokenizerPanic, and ValueError for texts that cannot be encoded."""
        if len(text) <= PIECE_CHARS:
            return self._ids(text, add_special_tokens)
        frame: tuple[list[int], list[int]] | None = ([], [])
        if add_special_tokens:
            frame = self._frame(text[:SAMPLE_CHARS]) or self._frame("a")  # a sample of blanks may have no tokens
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
        """The special tokens before and after every text; None if the sample does not show them."""
        plain, framed = self._ids(sample, False), self._ids(sample, True)
        for at in range(len(framed)):
            if plain and framed[at : at + len(plain)] == plain:
                return framed[:at], framed[at + len(plain) :]
        return None

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # encode() holds the interpreter's lock for the whole text, 0.2 s at 100K tokens; batch calls release it. The
        # fast variant takes half the time and memory, as it does not track the characters of tokens.
        with panics_as_errors():
            return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
