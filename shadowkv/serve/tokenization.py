"""Text to token ids for the server: what cannot fit is refused after a part of it, and long texts take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from shadowkv.serve.api_error import ApiError
from shadowkv.serve.limits import TOKENIZE_TOKENS
from shadowkv.wording import counted

if TYPE_CHECKING:
    from shadowkv.models.tokenizer import Tokenizer

T = TypeVar("T")

LONG = 2**16
"""Characters, or token ids, with which a prompt is long."""

TURNS = 2
"""Long prompts that are tokenised at a time: each takes some 60 bytes for a character."""

FIRST_PART, NEXT_PART = 8, 4
"""Characters for each token that may be, of the first part of a text; and how much longer each next part is. English
has four to five characters a token: one part tells. Runs of one character have up to a hundred."""

MARGIN = 1.25
"""A cut text may have a few tokens more than the whole one: its last word may be half of a longer token."""

WORD_CHARS = 256
"""A part ends where a word does, if there is an end that near."""

_turns = ThreadPoolExecutor(TURNS, "shadowkv-tokenize")


async def in_turn(size: int, work: Callable[[], T]) -> T:
    """What ``work`` returns, on a thread; of those with a ``size`` above ``LONG`` only a few run at a time."""
    if size <= LONG:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_turns, work)


def encode(tokenizer: Tokenizer, text: str, limit: int, param: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; raises ApiError as ``check_length`` does."""
    check_length(tokenizer, limit, param, text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_length(tokenizer: Tokenizer, limit: int, param: str, text: str) -> None:
    """Raises ApiError, naming ``param``, once a part of the text has many more tokens than ``limit``: the rest is never
    looked at. Counting tokens is the only sound way, since normalizers may shrink a text as they like.
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
    """Tokens that ``/tokenize`` gives: a prompt's, and of short contexts more, to see how much too long a text is."""
    return max(max_model_len, TOKENIZE_TOKENS)
