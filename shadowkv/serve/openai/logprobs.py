"""Log-probabilities in the OpenAI API's two forms, for completions and for chats, and in vLLM's form for prompts. A
step (``TokenLogprobs``) has a token's log-probability and those of the most likely tokens at its position (``top``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from shadowkv.engine.outputs import TokenLogprobs

if TYPE_CHECKING:
    from shadowkv.models.tokenization.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


@lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a token's text in the middle of a sentence. If the token is part of a character, the text is U+FFFD.

    The token is decoded together with a copy of itself, and the text of the copy is returned, because decoders strip a
    space at the beginning.
    """
    once, twice = (tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
    return twice[len(once) :]


def token_name(token_id: int) -> str:
    """Returns the name that a token has with ``return_tokens_as_token_ids``."""
    return f"token_id:{token_id}"


def width(tokenizer: Tokenizer, steps: Sequence[TokenLogprobs]) -> int:
    """Returns the number of characters of the tokens of ``steps``."""
    return sum(len(token_text(tokenizer, step.token_id)) for step in steps)


def scored_prompt(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None] | None, most: int | None
) -> list[TokenLogprobs]:
    """Returns a prompt's tokens as steps with at most ``most`` alternatives, or with all of them if ``most`` is None or
    -1. The log-probability of a token without a score, such as the first, is NaN."""
    known = scores or [None] * len(token_ids)
    return [
        TokenLogprobs(token, math.nan, {}) if step is None else _with_fewer(step, most)
        for token, step in zip(token_ids, known, strict=True)
    ]


def _with_fewer(step: TokenLogprobs, most: int | None) -> TokenLogprobs:
    if most is None or not 0 <= most < len(step.top):
        return step
    return TokenLogprobs(step.token_id, step.logprob, dict(islice(step.top.items(), most)))


def prompt_logprobs(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprobs | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """Returns the log-probabilities of a prompt in vLLM's form: for each position, a dictionary with token ids as keys.
    The first key is the prompt's token. Its ``rank`` is None if it is not among the reported most likely tokens."""
    return [None if step is None else _by_id(tokenizer, step) for step in scores]


def _by_id(tokenizer: Tokenizer, step: TokenLogprobs) -> dict[str, dict[str, Any]]:
    ranks = {token: rank for rank, token in enumerate(step.top, 1)}
    return {
        str(token): {
            "logprob": max(logprob, LOWEST),
            "rank": ranks.get(token),
            "decoded_token": token_text(tokenizer, token),
        }
        for token, logprob in ({step.token_id: step.logprob} | step.top).items()
    }


def completion_logprobs(
    tokenizer: Tokenizer, steps: Sequence[TokenLogprobs], offset: int, as_ids: bool = False
) -> dict[str, Any]:
    """Returns log-probabilities in the form of ``/v1/completions``. ``offset`` is the number of characters of the text
    before the first token. With ``as_ids``, tokens are named by ``token_name``."""
    texts = [token_text(tokenizer, step.token_id) for step in steps]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": [token_name(step.token_id) for step in steps] if as_ids else texts,
        "token_logprobs": [None if math.isnan(step.logprob) else max(step.logprob, LOWEST) for step in steps],
        "top_logprobs": [None if math.isnan(step.logprob) else _by_text(tokenizer, step, as_ids) for step in steps],
        "text_offset": offsets,
    }


def _by_text(tokenizer: Tokenizer, step: TokenLogprobs, as_ids: bool) -> dict[str, float]:
    likeliest: dict[str, float] = {}
    for token_id, logprob in ({step.token_id: step.logprob} | step.top).items():
        text = token_name(token_id) if as_ids else token_text(tokenizer, token_id)
        # All parts of characters have the text U+FFFD, whose entry is the highest log-probability among them.
        likeliest[text] = max(logprob, likeliest.get(text, LOWEST))
    return likeliest


def chat_logprobs(tokenizer: Tokenizer, steps: Sequence[TokenLogprobs], as_ids: bool = False) -> dict[str, Any]:
    """Returns log-probabilities in the form of ``/v1/chat/completions``. With ``as_ids``, tokens are named by
    ``token_name``."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_name(token_id) if as_ids else token_text(tokenizer, token_id)
        # The bytes of a part of a character cannot be derived from the text U+FFFD. The API allows null for them.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": data}

    content = []
    for step in steps:
        likeliest = sorted(step.top.items(), key=lambda item: -item[1])
        content.append(entry(step.token_id, step.logprob) | {"top_logprobs": [entry(*item) for item in likeliest]})
    return {"content": content, "refusal": None}
