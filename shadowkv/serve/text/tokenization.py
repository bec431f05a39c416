"""Tokenization for the server. A text that is too long is refused before it is tokenized, or as soon as one of its
parts has too many tokens. Only ``TURNS`` long texts are tokenized at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from shadowkv.engine.process.fair_turns import FairTurns, in_thread
from shadowkv.models.tokenization.text_encoder import NobodyWaits, unless_set
from shadowkv.serve.bodies.api_error import ApiError, server_stopping
from shadowkv.serve.bodies.limits import TOKENIZE_TOKENS
from shadowkv.serve.text.memory import give_back_small_blocks
from shadowkv.wording import counted

if TYPE_CHECKING:
    from shadowkv.models.tokenization.tokenizer import Tokenizer

T = TypeVar("T")

LONG = 2**16
"""Maximum size of a short prompt, in characters or token ids."""

TURNS = 3 if (os.cpu_count() or 1) > 2 else 2
"""Number of long prompts tokenized at once. One tenant gets at most ``TURNS - 1`` of them, so that another tenant need
not wait."""

FIRST_PART, NEXT_PART = 8, 4
"""The first part of a text has ``FIRST_PART`` characters per allowed token. Each further part also begins at the
text's beginning, and is ``NEXT_PART`` times as long as the one before. English has four to five characters per token,
so one part is enough. A repeated character has up to a hundred characters per token, so more parts may be needed."""

MARGIN = 1.25
"""A text is refused if a part of it has more tokens than this factor times the limit. The factor is above 1 because the
cut may split a token, so that the part alone has a few tokens more than within the whole text."""

WORD_CHARS = 256
"""A part ends at the end of a word, if a word ends within its last ``WORD_CHARS`` characters."""

_turns = FairTurns(TURNS)
_threads = ThreadPoolExecutor(TURNS, "shadowkv-tokenize")
_in_flight: set[Event] = set()


async def in_turn(tenant: str, size: int, work: Callable[[], T]) -> T:
    """Runs ``work`` on a thread that the tenants share, and returns its result. ``size`` is the number of characters or
    token ids to process. If ``size`` exceeds ``LONG``, at most ``TURNS`` such calls run at a time, and ``work`` is
    stopped when the caller is cancelled. Raises ApiError if ``drop_long`` stops ``work``."""
    if size <= LONG:
        return await in_thread(tenant, work)
    async with _turns.of(tenant):
        unwanted = Event()
        _in_flight.add(unwanted)

        def run() -> T:
            with unless_set(unwanted):
                return work()

        working = asyncio.get_running_loop().run_in_executor(_threads, run)
        try:
            return await asyncio.shield(working)
        except NobodyWaits:
            raise server_stopping() from None
        except asyncio.CancelledError:
            unwanted.set()
            await asyncio.wait((working,))  # another tenant's turn may begin only when this work has ended
            raise
        finally:
            _in_flight.discard(unwanted)
            if not _in_flight:  # no client waits for a long text now, so this delays none
                _threads.submit(give_back_small_blocks)


def drop_long() -> None:
    """Refuses all long texts that are being tokenized or waiting, because the server stops."""
    _turns.drop(server_stopping())
    for unwanted in _in_flight:
        unwanted.set()


def encode(tokenizer: Tokenizer, text: str, limit: int, param: str, add_special_tokens: bool = True) -> list[int]:
    """Returns the token ids of a text. Raises ApiError as ``check_length`` does, and for text that is not valid
    UTF-8."""
    try:
        check_length(tokenizer, limit, param, text)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise ApiError(str(error), param=param) from error


def check_length(tokenizer: Tokenizer, limit: int, param: str, text: str) -> None:
    """Raises ApiError, naming ``param``, for a text of more than ``limit`` tokens.

    First, a lower bound of the number of tokens is computed from the text's length. The bound is weak if tokens can be
    long, and useless if a normalizer can shrink the text. Then parts of the text are tokenized. The text is refused at
    the first part with more than ``MARGIN`` times ``limit`` tokens.
    """
    least = tokenizer.least_tokens(text)
    if least > limit:
        reason = f"{len(text)} characters are {counted(least, 'token')} or more"
        raise too_long(reason, param, least, limit)
    end = FIRST_PART * limit
    while end < len(text):
        cut = text.rfind(" ", end - WORD_CHARS, end)
        count = len(tokenizer.encode(text[: cut if cut > 0 else end], add_special_tokens=False))
        if count > MARGIN * limit:
            reason = f"the first {end} of the {len(text)} characters are about {count} tokens"
            raise too_long(reason, param, count, limit)
        end *= NEXT_PART


def check_tokens(tokenizer: Tokenizer, tokens: Sequence[int], param: str) -> None:
    """Raises ApiError, naming ``param``, for a token id that is not in the model's vocabulary."""
    vocab = tokenizer.vocab_size
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab:
            raise ApiError(f"token id {token} is out of vocabulary: this model has {vocab} tokens", param=param)


def check_prompt(tokenizer: Tokenizer, prompt: Sequence[int], limit: int, param: str) -> None:
    """Raises ApiError, naming ``param``, for a prompt of more than ``limit`` token ids, or with an id outside the
    model's vocabulary."""
    if len(prompt) > limit:
        raise too_long(f"the prompt has {len(prompt)}", param, len(prompt), limit)
    check_tokens(tokenizer, prompt, param)


def too_long(reason: str, param: str, tokens: int, limit: int) -> ApiError:
    """Returns the error for a prompt of at least ``tokens`` tokens, which exceeds a context of ``limit`` tokens."""
    text = f"at most {counted(limit, 'token')} are allowed, but {reason}"
    counts = {"n_prompt_tokens": tokens, "n_ctx": limit}
    return ApiError(text, param=param, code="context_length_exceeded", counts=counts)


def tokenize_limit(max_model_len: int) -> int:
    """Returns the maximum number of tokens that ``/tokenize`` returns. It is the length of the context, but at least
    ``TOKENIZE_TOKENS``, so that a client can find out how much a text exceeds a short context."""
    return max(max_model_len, TOKENIZE_TOKENS)
