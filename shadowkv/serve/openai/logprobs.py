"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shadowkv.engine.outputs import TokenLogprobs

if TYPE_CHECKING:
    from shadowkv.models.tokenization.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text in the middle of a sentence; half a character is U+FFFD.

    It is taken from the second of two: decoders strip the space that a text begins with.
    """
    once, twice = (tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
    return twice[len(once) :]


def width(tokenizer: Tokenizer, steps: Sequence[TokenLogprobs]) -> int:
    """Characters of the steps' tokens."""
    return sum(len(token_text(tokenizer, step.token_id)) for step in steps)


def scored_prompt(token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None] | None) -> list[TokenLogprobs]:
    """A prompt's tokens as steps; one without a score (the first, which has nothing before it) gets NaN."""
    known = scores or [None] * len(token_ids)
    return [step or TokenLogprobs(token, math.nan, {}) for token, step in zip(token_ids, known, strict=True)]


def completion_logprobs(tokenizer: Tokenizer, steps: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """Shape of ``/v1/completions``; ``offset`` is where the first token begins in the text, in characters."""
    tokens = [token_text(tokenizer, step.token_id) for step in steps]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if math.isnan(step.logprob) else max(step.logprob, LOWEST) for step in steps],
        "top_logprobs": [None if math.isnan(step.logprob) else _by_text(tokenizer, step) for step in steps],
        "text_offset": offsets,
    }


def _by_text(tokenizer: Tokenizer, step: TokenLogprobs) -> dict[str, float]:
    likeliest: dict[str, float] = {}
    for token_id, logprob in ({step.token_id: step.logprob} | step.top).items():
        text = token_text(tokenizer, token_id)
        # Parts of characters share the text U+FFFD: the most likely one stands for them.
        likeliest[text] = max(logprob, likeliest.get(text, LOWEST))
    return likeliest


def chat_logprobs(tokenizer: Tokenizer, steps: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Shape of ``/v1/chat/completions``."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token_id)
        # Part of a character: the text does not reveal its bytes, and the API allows null.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": data}

    content = []
    for step in steps:
        likeliest = sorted(step.top.items(), key=lambda item: -item[1])
        content.append(entry(step.token_id, step.logprob) | {"top_logprobs": [entry(*item) for item in likeliest]})
    return {"content": content, "refusal": None}
