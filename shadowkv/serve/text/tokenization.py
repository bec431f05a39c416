"""Text to token ids for the server: what cannot fit is refused before it is tokenised, or after a part of it, and long
texts take turns."""

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
"""Characters, or token ids, from which on a prompt is long."""

TURNS = 3 if (os.cpu_count() or 1) > 2 else 2
"""Long prompts tokenised at a time, of each tenant one less: that leaves a core to the others."""

FIRST_PART, NEXT_PART = 8, 4
"""Characters per allowed token in the first part of a text, and the factor by which each next part is longer. English
has four to five characters a token: one part suffices. Runs of one character have up to a hundred."""

MARGIN = 1.25
"""A cut text may have a few tokens more than the whole one: its last word may be half of a longer token."""

WORD_CHARS = 256
"""A part ends at the end of a word, if there is one this near."""

_turns = FairTurns(TURNS)
_threads = ThreadPoolExecutor(TURNS, "shadowkv-tokenize")
_in_flight: set[Event] = set()


async def in_turn(tenant: str, size: int, work: Callable[[], T]) -> T:
    """What ``work`` returns, on a thread that the tenants share; of those with a ``size`` above ``LONG`` only a few run
    at a time, and none longer than somebody waits for it. Raises ApiError where ``drop_long`` ends it."""
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
            await asyncio.wait((working,))  # the turn is free when its work has ended
            raise
        finally:
            _in_flight.discard(unwanted)
            if not _in_flight:  # nobody waits for it
                _threads.submit(give_back_small_blocks)


def drop_long() -> None:
    """Refuses all long texts that are tokenised or wait for it, because the server ends."""
    _turns.drop(server_stopping())
    for unwanted in _in_flight:
        unwanted.set()


def encode(tokenizer: Tokenizer, text: str, limit: int, param: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; raises ApiError as ``check_length`` does."""
    check_length(tokenizer, limit, param, text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_length(tokenizer: Tokenizer, limit: int, param: str, text: str) -> None:
    """Raises ApiError, naming ``param``, for a text that has more than ``limit`` tokens by its length, or once a part
    of it has many more: the rest is not looked at. Length tells little where tokens may be long, and nothing where a
    normaliser may shrink the text.
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
    """Raises ApiError, naming ``param``, for a token id that the model has not."""
    vocab = tokenizer.vocab_size
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab:
            raise ApiError(f"token id {token} is out of vocabulary: this model has {vocab} tokens", param=param)


def check_prompt(tokenizer: Tokenizer, prompt: Sequence[int], limit: int, param: str) -> None:
    """Raises ApiError, naming ``param``, for a prompt of token ids that has more than ``limit``, or one that the model
    has not."""
    if len(prompt) > limit:
        raise too_long(f"the prompt has {len(prompt)}", param, len(prompt), limit)
    check_tokens(tokenizer, prompt, param)


def too_long(reason: str, param: str, tokens: int, limit: int) -> ApiError:
    """The refusal of a prompt of ``tokens`` tokens or more, which no context of ``limit`` has room for."""
    text = f"at most {counted(limit, 'token')} may come, but {reason}"
    counts = {"n_prompt_tokens": tokens, "n_ctx": limit}
    return ApiError(text, param=param, code="context_length_exceeded", counts=counts)


def tokenize_limit(max_model_len: int) -> int:
    """Most tokens that ``/tokenize`` returns: a prompt's, or for short contexts more, to show how long a text is."""
    return max(max_model_len, TOKENIZE_TOKENS)
