"""Bodies of the requests: the OpenAI API's parameters that are supported, and vLLM's extra ones.

A parameter that would change the answer and is not supported is an error, never ignored. Every list is bounded
(``limits.py``) and checked up to its first wrong item: an error for each of a million takes seconds and gigabytes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shadowkv.engine.sampling_params import SamplingParams, choice_seed
from shadowkv.serve.limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEXT_CHARS,
    MAX_TOKEN_ID,
)
from shadowkv.serve.request_schema import IGNORED, NEUTRAL, RESPONSE_FORMAT, complete
from shadowkv.serve.response_format import json_schema

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]


class Body(BaseModel):
    """Strict about types; null is the same as left out, as in the OpenAI API."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=complete)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            # By type too: true is 1 to Python, and 0.0 is false.
            neutral_values = NEUTRAL.get(name, ())
            if name in IGNORED or any(type(value) is type(one) and value == one for one in neutral_values):
                continue
            text = "{param} is not supported" + ("; leave it out or pass {neutral}" if name in NEUTRAL else "")
            neutral = " or ".join(repr(value) for value in NEUTRAL.get(name, ()))
            raise PydanticCustomError("unsupported", text, {"param": name, "neutral": neutral})
        self.__pydantic_extra__ = {}  # of any size and depth, and of no use
        return self


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: bool = False


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]


def _biases(value: Any) -> Any:
    """JSON's keys are strings; whatever is no token id is left for the field's own check to refuse."""
    if not isinstance(value, dict):
        return value
    _at_most(MAX_LOGIT_BIASES, "token ids", len(value))
    return {int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key) else key: value[key] for key in value}


LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_biases, json_schema_input_type=Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)]),
]


Salt = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]

ResponseFormat = Annotated[dict[str, Any], WithJsonSchema(RESPONSE_FORMAT)]


class GenerationRequest(Body):
    """What completions and chat completions have in common."""

    model: Name | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int = SamplingParams.min_tokens
    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    min_p: float = SamplingParams.min_p
    repetition_penalty: float = SamplingParams.repetition_penalty
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    logit_bias: LogitBias = {}
    stop: Annotated[StopStrings, BeforeValidator(_one_or_many, json_schema_input_type=StopString | StopStrings)] = []
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    ignore_eos: bool = False
    seed: Int64 | None = None
    cache_prompt: bool = SamplingParams.cache_prompt
    cache_salt: Salt | None = None
    response_format: Annotated[str | None, PlainValidator(json_schema, json_schema_input_type=ResponseFormat)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        if self.best_of not in (None, self.n):
            raise refusal("best_of", "best_of is not supported; leave it out or pass the same as n")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "stream_options is only allowed with stream")
        self._first_choice()
        return self

    @property
    def limit(self) -> int | None:
        """Tokens to generate at the most."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Log-probabilities to report per token, as in ``SamplingParams.logprobs``."""
        raise NotImplementedError

    @property
    def prompt_alternatives(self) -> int | None:
        """The same for the prompt's tokens."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> list[SamplingParams]:
        """One per choice; those of a seeded request have the seeds of ``choice_seed``."""
        first = self._first_choice()
        seeds = [None if self.seed is None else choice_seed(self.seed, choice) for choice in range(1, self.n)]
        return [first, *(replace(first, seed=seed) for seed in seeds)]

    def _first_choice(self) -> SamplingParams:
        own: dict[str, Any] = {
            "max_tokens": self.limit,
            "logprobs": self.alternatives,
            "prompt_logprobs": self.prompt_alternatives,
            "json_schema": self.response_format,
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
        }
        others = {name: getattr(self, name) for name in _SAMPLING & type(self).model_fields.keys() - own.keys()}
        try:
            return SamplingParams(**own, **others)
        except ValueError as error:
            # Every reason begins with its parameter: "top_p=2 must be …".
            raise refusal(str(error).split()[0].split("=")[0], str(error)) from error


def refusal(param: str, message: str) -> PydanticCustomError:
    """A parameter's refusal, to raise in a validator."""
    return PydanticCustomError("refused", "{message}", {"param": param, "message": message})


Tokens = array
"""Token ids in 32 bits each: a list of a million takes as many objects, and as long to send between processes."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenList = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
TokenPrompt = Annotated[TokenList, Field(min_length=1)]
Prompt = Text | TokenPrompt | Annotated[list[Text | TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS)]


def prompts_of(value: Any) -> list[str | Tokens]:
    """Every form of ``prompt`` as a list of texts and token ids.

    Not left to a union type: that would try a list of a million tokens as each member, with an error per item.
    """
    prompts = value if isinstance(value, list) and value and type(value[0]) is not int else [value]
    _at_most(MAX_PROMPTS, "prompts", len(prompts))
    _at_most(MAX_TEXT_CHARS, "characters", sum(len(prompt) for prompt in prompts if isinstance(prompt, str)))
    _at_most(MAX_PROMPT_TOKENS, "token ids", sum(len(prompt) for prompt in prompts if isinstance(prompt, list)))
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_tokens(prompt):
            raise wrong("prompt must be a string, a list of token ids, or a list of either")
        if isinstance(prompt, list) and not prompt:
            raise wrong("prompt must not be empty")
    return [prompt if isinstance(prompt, str) else _packed(prompt) for prompt in prompts]


def _tokens(value: Any) -> Tokens:
    if not _is_tokens(value):
        raise wrong("must be a list of token ids")
    _at_most(MAX_PROMPT_TOKENS, "token ids", len(value))
    return _packed(value)


TokenIds = Annotated[Tokens, PlainValidator(_tokens, json_schema_input_type=TokenList)]


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _packed(ids: list[int]) -> Tokens:
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token <= MAX_TOKEN_ID:
            raise wrong(f"{token if abs(token) < 2**64 else 'a number of more than 64 bits'} is no token id")
    return array("i", ids)


def _at_most(limit: int, things: str, count: int) -> None:
    if count > limit:
        raise wrong(f"{count} {things} are too many; at most {limit} are allowed")


def wrong(message: str) -> PydanticCustomError:
    """A value's refusal, to raise in the validator of its field."""
    return PydanticCustomError("wrong", "{message}", {"message": message})


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    prompt: Annotated[list[str | Tokens], PlainValidator(prompts_of, json_schema_input_type=Prompt)]
    logprobs: int | None = None
    echo: bool = False

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        # Nothing is to be generated: the engine takes that as a request to score the prompt.
        return (self.logprobs or 0) if self.echo and (self.logprobs is not None or self.max_tokens == 0) else None


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: Text


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Message(Body):
    """One turn of a conversation; ``developer`` is OpenAI's newer name for ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Parts, BeforeValidator(_as_parts, json_schema_input_type=Text | Parts)]
    name: Name | None = None

    def for_template(self) -> dict[str, str]:
        """What chat templates expect."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": "\n".join(part.text for part in self.content), **named}


def characters(turns: Iterable[Mapping[str, str]]) -> int:
    """Length of a conversation."""
    return sum(len(turn["content"]) for turn in turns)


def _within_limits(value: Any) -> Any:
    """All messages together, before any is looked at for itself."""
    if isinstance(value, list):
        contents = [message.get("content") for message in value if isinstance(message, dict)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        texts = contents + [part.get("text") for part in parts if isinstance(part, dict)]
        _at_most(MAX_MESSAGES, "content parts", len(parts))
        _at_most(MAX_TEXT_CHARS, "characters", sum(len(text) for text in texts if isinstance(text, str)))
    return value


# Checked as messages, kept as what templates expect: thousands of plain dictionaries are quickly taken over from the
# process that read them, and models are not.
if TYPE_CHECKING:
    Turn = dict[str, str]
else:
    Turn = Annotated[Message, AfterValidator(Message.for_template)]
Turns = Annotated[list[Turn], Field(max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(_within_limits)]


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Turns = Field(min_length=1)
    max_completion_tokens: int | None = None
    parse_special: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs is only allowed with logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise refusal("max_tokens", "max_tokens and max_completion_tokens differ; pass one of them")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Body):
    """Body of ``/tokenize``: a text or a conversation."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Turns | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    parse_special: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise refusal("prompt", "pass either prompt or messages")
        if self.parse_special is not None and self.prompt is not None:
            raise refusal("parse_special", "parse_special is for messages; leave it out, a prompt's are always parsed")
        return self

    @property
    def size(self) -> int:
        """Characters of the text or of all messages."""
        return len(self.prompt or "") + characters(self.messages or ())


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    model: Name | None = None
    tokens: TokenIds
