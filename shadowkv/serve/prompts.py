"""``prompt``, in every form that the OpenAI API accepts, and lists of token ids."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from shadowkv.serve.body import Text, at_most, wrong
from shadowkv.serve.limits import MAX_PROMPT_TOKENS, MAX_PROMPTS, MAX_TEXT_CHARS, MAX_TOKEN_ID

Tokens = array
"""Token ids in 32 bits each: a list of a million has as many objects, and is slow to send between processes."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenList = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS)]
TokenPrompt = Annotated[TokenList, Field(min_length=1)]
Prompt = Text | TokenPrompt | Annotated[list[Text | TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS)]


def prompts_of(value: Any) -> list[str | Tokens]:
    """Every form of ``prompt`` as a list of texts and token ids.

    Not left to a union type: that would try a list of a million tokens as each member, with an error per item.
    """
    prompts = value if isinstance(value, list) and value and type(value[0]) is not int else [value]
    at_most(MAX_PROMPTS, "prompts", len(prompts))
    at_most(MAX_TEXT_CHARS, "characters", sum(len(prompt) for prompt in prompts if isinstance(prompt, str)))
    at_most(MAX_PROMPT_TOKENS, "token ids", sum(len(prompt) for prompt in prompts if isinstance(prompt, list)))
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_tokens(prompt):
            raise wrong("prompt must be a string, a list of token ids, or a list of either")
        if isinstance(prompt, list) and not prompt:
            raise wrong("prompt must not be empty")
    return [prompt if isinstance(prompt, str) else _packed(prompt) for prompt in prompts]


def _tokens(value: Any) -> Tokens:
    if not _is_tokens(value):
        raise wrong("must be a list of token ids")
    at_most(MAX_PROMPT_TOKENS, "token ids", len(value))
    return _packed(value)


TokenIds = Annotated[Tokens, PlainValidator(_tokens, json_schema_input_type=TokenList)]


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _packed(ids: list[int]) -> Tokens:
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token <= MAX_TOKEN_ID:
            raise wrong(f"{token if abs(token) < 2**64 else 'a number of more than 64 bits'} is no token id")
    return array("i", ids)
