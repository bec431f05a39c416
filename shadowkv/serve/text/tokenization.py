"""Text to token ids for the server: what cannot fit is refused after a part of it, and long texts take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.limits import TOKENIZE_TOKENS
from shadowkv.wording import counted

if TYPE_CHECKING:
    from shadowkv.models.tokenization.tokenizer import Tokenizer

T = TypeVar("T")

LONG = 2**16
"""Characters, or token ids, from which on a prompt is long."""

TURNS = 2
"""Long prompts tokenised at a time: each takes some 60 bytes per character."""

FIRST_PART, NEXT_PART = 8, 4
"""Characters per allowed token in the first part of a text, and the factor by which each next part is longer. English
has four to five characters a token: one part suffices. Runs of one character have up to a hundred."""

MARGIN = 1.25
"""A cut text may have a few tokens more than the whole one: its last word may be half of a longer token."""

WORD_CHARS = 256
"""A part ends at the end of a word, if there is one this near."""

_turns = ThreadPoolExecutor(TURNS, "shadowkv-tokenize")


async def in_turn(size: int, work: Callable[[], T]) -> T:
    """What ``work`` returns, on a thread; only a few with a ``size`` above ``LONG`` run at a time."""
    if size <= LONG:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_turns, work)


def encode(tokenizer: Tokenizer, text: str, limit: int, param: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; raises ApiError as ``check_length`` does."""
    check_length(tokenizer, limit, param, text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_length(tokenizer: Tokenizer, limit: int, param: str, text: str) -> None:
    """Raises ApiError, naming ``param``, once a part of the text has many more tokens than ``limit``: the rest is not
    looked at. Counting tokens is the only sound way, since normalizers may shrink a text arbitrarily.
    """
    end = FIRST_PART * limit
    while end < len(text):
        cut = text.rfind(" ", end - WORD_CHARS, end)
        count = len(tokenizer.encode(text[: cut if cut > 0 else end], add_special_tokens=False))
        if count > MARGIN * limit:
            reason = f"the first {end} of the {len(text)} characters are about {count} tokens"
            raise too_long(f"at most {counted(limit, 'token')} may come, but {reason}", param)
        end *= NEXT_PART


def too_long(message: str, param: str) -> ApiError:
    """The refusal of a prompt that no context has room for."""
    return ApiError(message, param=param, code="context_length_exceeded")


def tokenize_limit(max_model_len: int) -> int:
    """Most tokens that ``/tokenize`` returns: a prompt's, or for short contexts more, to show how long a text is."""
    return max(max_model_len, TOKENIZE_TOKENS)
