"""Request bodies: the supported parameters of the OpenAI API, further parameters of vLLM, and those of ``/cache``.

A parameter that would change the answer and is not supported is an error. An unknown parameter is ignored. The length
of every list is limited (``limits.py``). The check of a list stops at the first wrong item, because a million errors
would take seconds and gigabytes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from shadowkv.engine.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    RepetitionDetectionParams,
    SamplingParams,
    choice_seed,
)
from shadowkv.grammar_text import grammar_kind
from shadowkv.prefix_cache.protocol import SAVE_NAME, SNAPSHOT_NAME, check_save_name
from shadowkv.serve.bodies.api_error import ApiError, from_validation
from shadowkv.serve.bodies.body import Body, Name, Text, at_most, refusal, wrong
from shadowkv.serve.bodies.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_NAME_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_SNAPSHOTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEXT_CHARS,
    MAX_TOKEN_ID,
)
from shadowkv.serve.openai.messages import Conversation, Prediction, Turns
from shadowkv.serve.openai.output_schema import (
    RESPONSE_FORMAT,
    Choices,
    Rules,
    StructuredOutputs,
    calls_schema,
    format_text,
)
from shadowkv.serve.openai.tools import Choice, ToolChoice

Tokens = array
"""Token ids, with 32 bits each. A list of a million ints would be a million objects, which are slow to send between
processes."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenList = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS)]
TokenPrompt = Annotated[TokenList, Field(min_length=1)]
Prompt = Text | TokenPrompt | Annotated[list[Text | TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS)]

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))

RULES = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},  # vLLM's older names
    **{"regex": "regex", "ebnf": "grammar"},  # SGLang's names
    **{"grammar": "grammar", "json_schema": "json"},  # llama.cpp's names
}
"""Maps other names of parameters to the fields of ``structured_outputs`` that they mean."""

COMPLETION_TOKENS = 16
"""Value of ``max_tokens`` for a completion without it, as in the OpenAI API."""


def prompts_of(value: Any) -> list[str | Tokens]:
    """Converts every form of ``prompt`` that the OpenAI API accepts to a list of texts and token ids.

    No union type is used: pydantic would try a list of a million tokens as each type, and report an error per item.
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
            raise wrong(f"{token if abs(token) < 2**64 else 'a number of more than 64 bits'} is not a token id")
    return array("i", ids)


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Body):
    """``stream_options``; ``continuous_usage_stats`` needs ``include_usage``, as in vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class RepetitionDetection(Body):
    """``repetition_detection``."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    @model_validator(mode="after")
    def _check(self) -> RepetitionDetection:
        _ = self.params
        return self

    @property
    def params(self) -> RepetitionDetectionParams:
        """The parameters in the engine's form. Reading them raises PydanticCustomError if they are invalid."""
        try:
            return RepetitionDetectionParams(self.max_pattern_size, self.min_pattern_size, self.min_count)
        except ValueError as error:
            raise refusal(str(error).split("=")[0], str(error)) from error


def _one_or_many(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or len(value) > MAX_STOP_STRINGS or not all(isinstance(item, str) for item in value):
        raise wrong(f"must be a string or a list of up to {MAX_STOP_STRINGS} strings")
    return value


StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]


def _biases(value: Any) -> Any:
    """Converts the keys, which are strings in JSON, to token ids. The field's own check refuses keys of other forms."""
    if not isinstance(value, dict):
        return value
    at_most(MAX_LOGIT_BIASES, "token ids", len(value))
    return {int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key) else key: value[key] for key in value}


LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_biases, json_schema_input_type=Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)]),
]


SnapshotName = Annotated[str, Field(pattern=f"^{SNAPSHOT_NAME}$")]


class KVTransferParams(Body):
    """How a request is split between servers. With ``do_remote_decode``, another server continues the prompt. With
    ``do_remote_prefill``, another server has computed the prompt and saved it as ``remote_snapshots``.
    ``prompt_token_ids`` are a chat's prompt, if another server has rendered the messages. Fields that only vLLM's
    connectors use are ignored."""

    prompt_token_ids: TokenIds | None = None
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_snapshots: list[SnapshotName] = Field(default=[], max_length=MAX_SNAPSHOTS, fail_fast=True)


Salt = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]

ResponseFormat = Annotated[dict[str, Any], WithJsonSchema(RESPONSE_FORMAT)]

Stops = Annotated[StopStrings, BeforeValidator(_one_or_many, json_schema_input_type=StopString | StopStrings)]


class TextRequest(Body):
    """Parameters of a text request in every API."""

    model: Name | None = None
    priority: Int64 = 0
    stream: bool = False


class Sampling(TextRequest):
    """Parameters that all text requests of OpenAI's and Anthropic's APIs share."""

    min_tokens: int = SamplingParams.min_tokens
    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    min_p: float = SamplingParams.min_p
    repetition_penalty: float = SamplingParams.repetition_penalty
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    logit_bias: LogitBias = Field({})
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    ignore_eos: bool = False
    seed: Int64 | None = None
    cache_prompt: bool = SamplingParams.cache_prompt
    cache_salt: Salt | None = None


class GenerationRequest(Sampling):
    """Parameters that completions and chat completions share."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = Field(None, ge=-1)
    stop: Stops = Field([])
    response_format: Annotated[str | None, PlainValidator(format_text, json_schema_input_type=ResponseFormat)] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Rules | dict[str, Any] | None = None
    guided_regex: Rules | None = None
    guided_choice: Choices | None = None
    guided_grammar: Rules | None = None
    regex: Rules | None = None
    ebnf: Rules | None = None
    grammar: Rules | None = None
    json_schema: Rules | dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    return_selections: bool = SamplingParams.return_selections
    return_progress: bool = SamplingParams.return_progress
    return_quality: bool = False
    timings_per_token: bool = False
    kv_transfer_params: KVTransferParams | None = None
    request_id: Name | None = None
    allowed_token_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)
    bad_words: list[Name] = Field([], max_length=MAX_BAD_WORDS, fail_fast=True)
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    include_stop_str_in_output: bool = SamplingParams.include_stop_str_in_output
    skip_special_tokens: bool = SamplingParams.skip_special_tokens
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_PROMPT_TOKENS)
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = Field(None, max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        if self.n_predict not in (None, -1):  # llama.cpp's name
            if self.max_tokens not in (None, self.n_predict):
                raise refusal("n_predict", "n_predict and max_tokens differ; pass one of them")
            self.max_tokens = self.n_predict
        if self.prompt_logprobs is not None and self.stream:
            raise refusal("prompt_logprobs", "prompt_logprobs cannot be streamed; leave out prompt_logprobs or stream")
        if self.logprob_token_ids and self.alternatives is None:
            raise refusal("logprob_token_ids", "logprob_token_ids is only allowed with logprobs")
        if "truncation_side" in self.model_fields_set and self.truncate_prompt_tokens is None:
            raise refusal("truncation_side", "truncation_side is only allowed with truncate_prompt_tokens")
        if self.best_of not in (None, self.n):
            raise refusal("best_of", "best_of is not supported; leave it out, or pass the value of n")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "stream_options is only allowed with stream")
        rules = ("response_format", "structured_outputs", *RULES)
        given = [name for name in rules if getattr(self, name) is not None]
        if len(given) > 1:
            raise refusal(given[1], f"pass one of {' and '.join(given)}: an output follows one constraint")
        self._first_choice({}, None)
        return self

    def limit(self, room: int | None) -> int | None:
        """Returns the maximum number of tokens to generate. None means the server's default.

        Args:
            room: number of tokens left in the context; None means no limit.
        """
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of log-probabilities to report per token, as in ``SamplingParams.logprobs``."""
        raise NotImplementedError

    @property
    def prompt_alternatives(self) -> int | None:
        """Number of log-probabilities to report per prompt token."""
        return self.prompt_logprobs

    def truncated(self, prompt: list[int], max_model_len: int, default_max_tokens: int) -> list[int]:
        """Cuts a prompt to its last ``truncate_prompt_tokens`` tokens, or to its first ones if ``truncation_side`` is
        "right".

        If ``truncate_prompt_tokens`` is -1, the prompt is cut so that the answer still fits in the context. If the
        request does not limit the answer's length, room is left for ``default_max_tokens`` tokens, but for at most half
        of the context. Raises ApiError if ``truncate_prompt_tokens`` exceeds the context.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        if most > max_model_len:
            reason = f"truncate_prompt_tokens={most} is more than the context of this model, {max_model_len} tokens"
            raise ApiError(reason, param="truncate_prompt_tokens")
        if most == -1:
            answer = self.limit(None)
            most = max(1, max_model_len - (min(default_max_tokens, max_model_len // 2) if answer is None else answer))
        if self.truncation_side == "right":
            return prompt[:most]
        return prompt[max(0, len(prompt) - most) :]

    @property
    def output_schema(self) -> str | None:
        """The constraint on the output: a JSON schema as JSON text, another grammar (``grammar_text``), or None."""
        return self.response_format if self.structured is None else self.structured.text

    @property
    def structured(self) -> StructuredOutputs | None:
        """``structured_outputs``, also if the request gives it under another name (``RULES``); None without it."""
        for name, kind in RULES.items():
            if (value := getattr(self, name)) is not None:
                try:
                    return StructuredOutputs.model_validate({kind: value})
                except ValidationError as error:
                    raise refusal(name, from_validation(error.errors(include_url=False)).message) from error
        return self.structured_outputs

    @property
    def on_one_line(self) -> bool:
        """Whether JSON output has no line breaks, and at most one space after each comma and colon."""
        return self.calls_are_forced or (self.structured is not None and self.structured.disable_any_whitespace)

    @property
    def calls_are_forced(self) -> bool:
        """Whether ``output_schema`` is that of tool calls that ``tool_choice`` forces. They are written on one line, as
        in models' training data. If any white space were allowed, small models would write nothing but white space."""
        return False

    @property
    def parses_calls(self) -> bool:
        """Whether the model itself decides whether to call tools. It then writes the calls in its own format."""
        return False

    @property
    def one_call(self) -> bool:
        """Whether a choice calls at most one tool."""
        return False

    def sampling(
        self, defaults: Mapping[str, float] = MappingProxyType({}), room: int | None = None
    ) -> list[SamplingParams]:
        """Returns the sampling parameters of each choice of a prompt. The first choice has the request's seed. The
        other choices have seeds that ``choice_seed`` makes from it.

        Args:
            defaults: parameters that the model's authors recommend. They are used where the request sets no value.
            room: number of tokens left in the context after the prompt; None means no limit.
        """
        first = self._first_choice(defaults, room)
        seeds = [None if first.seed is None else choice_seed(first.seed, choice) for choice in range(1, self.n)]
        return [first, *(replace(first, seed=seed) for seed in seeds)]

    def _first_choice(self, defaults: Mapping[str, float], room: int | None) -> SamplingParams:
        schema = self.output_schema
        kind = "json_schema" if schema is None or grammar_kind(schema) is None else "grammar"
        own: dict[str, Any] = {
            "max_tokens": self.limit(room),
            "logprobs": self.alternatives,
            "prompt_logprobs": self.prompt_alternatives,
            "json_schema": None,
            "grammar": None,
            kind: schema,
            "json_one_line": self.on_one_line,
            "structured_outputs": None,
            "logprob_token_ids": tuple(self.logprob_token_ids) if self.logprob_token_ids else None,
            "repetition_detection": None if self.repetition_detection is None else self.repetition_detection.params,
            "return_progress": self.return_progress and self.stream,
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
        }
        others = {name: getattr(self, name) for name in _SAMPLING & type(self).model_fields.keys() - own.keys()}
        others |= {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        try:
            return SamplingParams(**own, **others)
        except ValueError as error:
            # Every message begins with the name of the parameter, as in "top_p=2 must be …".
            raise refusal(str(error).split()[0].split("=")[0], str(error)) from error


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    prompt: Annotated[list[str | Tokens], PlainValidator(prompts_of, json_schema_input_type=Prompt)]
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _need_prompt(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("prompt") is None and data.get("prompt_embeds") == []:
            words = "Either prompt or prompt_embeds must be provided and non-empty"  # vLLM's message
            raise refusal("prompt", f"{words}. This server supports prompt, but not prompt_embeds")
        return data

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.logprob_token_ids and self.max_tokens == 0:
            raise refusal("logprob_token_ids", "logprob_token_ids has no meaning with max_tokens=0: no token is chosen")
        return self

    def limit(self, room: int | None) -> int | None:
        if self.max_tokens is not None:
            return self.max_tokens
        return COMPLETION_TOKENS if room is None else max(1, min(COMPLETION_TOKENS, room))

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        if self.prompt_logprobs is not None or not self.echo:
            return self.prompt_logprobs
        # With max_tokens=0, the engine treats prompt_logprobs=0 as a request to score the prompt.
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs


class ChatRequest(GenerationRequest, Conversation):
    """Body of ``/v1/chat/completions``."""

    messages: Turns = Field(min_length=1)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = None
    parse_special: bool = False
    add_special_tokens: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    include_reasoning: bool = True
    echo: bool = False
    verbose: bool = False
    verbosity: Literal["medium"] = "medium"
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.remote_prompt is not None and not self.remote_prompt:
            raise refusal(
                "kv_transfer_params.prompt_token_ids", "kv_transfer_params.prompt_token_ids must not be empty"
            )
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs is only allowed with logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise refusal("max_tokens", "max_tokens and max_completion_tokens differ; pass one of them")
        chosen, names = self.chosen_tools, [tool["function"]["name"] for tool in self.tools]
        if chosen.is_forced and not names:
            raise refusal("tool_choice", f"tool_choice {chosen} needs tools to choose from")
        if chosen.name is not None and chosen.name not in names:
            raise refusal("tool_choice", f"tool_choice names {chosen.name!r}, which is not in tools")
        if names and chosen.kind != "none" and super().output_schema is not None:
            name = "response_format" if self.structured is None else "structured_outputs"
            reason = f"{name} leaves no room for tool calls; leave {name} out, or pass tool_choice 'none'"
            raise refusal(name, reason)
        if chosen.is_forced and (self.min_tokens or self.ignore_eos):
            raise refusal("tool_choice", f"tool_choice {chosen} ends the output: leave min_tokens and ignore_eos out")
        return self

    @property
    def remote_prompt(self) -> Tokens | None:
        return None if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids

    @property
    def echoed(self) -> str:
        """The text that ``echo`` puts before the answer: the last message if it is the assistant's, otherwise ""."""
        last = self.messages[-1]
        return last["content"] if self.echo and last["role"] == "assistant" else ""

    @property
    def chosen_tools(self) -> Choice:
        """``tool_choice``; if it is not set, "auto" with tools and "none" without."""
        return self.tool_choice or Choice("auto" if self.tools else "none")

    def limit(self, room: int | None) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def output_schema(self) -> str | None:
        if not self.calls_are_forced:
            return super().output_schema
        return calls_schema(self.tools, self.chosen_tools, self.parallel_tool_calls)

    @property
    def calls_are_forced(self) -> bool:
        return self.chosen_tools.is_forced

    @property
    def one_call(self) -> bool:
        return not self.parallel_tool_calls

    @property
    def parses_calls(self) -> bool:
        return bool(self.tools) and self.chosen_tools.kind == "auto"


class TokenizeRequest(Conversation):
    """Body of ``/tokenize``: a text or a conversation. ``content``, ``add_special`` and ``with_pieces`` are parameters
    of llama.cpp."""

    model: Name | None = None
    prompt: Text | None = None
    content: Text | None = None
    add_special: bool = False
    with_pieces: bool = False
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_text(self) -> TokenizeRequest:
        given = (self.prompt is not None, self.content is not None, bool(self.messages))
        if sum(given) != 1:
            raise refusal("prompt", "pass either prompt, messages or content")
        if self.parse_special is not None and self.prompt is not None:
            raise refusal("parse_special", "parse_special needs messages; leave it out, a prompt is always parsed")
        return self

    @property
    def size(self) -> int:
        """Number of characters of the text, or of the messages and tools."""
        return len(self.prompt or self.content or "") + self.characters


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    model: Name | None = None
    tokens: TokenIds


def _save_name(value: Any) -> str:
    if not isinstance(value, str):
        raise wrong("must be a string")
    try:
        return check_save_name(value)
    except ValueError as error:
        raise wrong(str(error)) from error


SaveName = Annotated[
    str, PlainValidator(_save_name, json_schema_input_type=Annotated[str, Field(pattern=f"^{SAVE_NAME}$")])
]


def _one_prompt(value: Any) -> list[str | Tokens]:
    prompts = prompts_of(value)
    if len(prompts) > 1:
        raise wrong(f"pass one prompt, not {len(prompts)}: a name is for one prompt")
    return prompts


class RestoreRequest(Body):
    """Body of ``/cache/restore``."""

    model: Name | None = None
    name: SaveName


class SaveRequest(RestoreRequest, Conversation):
    """Body of ``/cache/save``: a name, and a prompt or messages as in a completion or a chat completion."""

    prompt: Annotated[
        list[str | Tokens] | None, PlainValidator(_one_prompt, json_schema_input_type=Text | TokenPrompt)
    ] = None
    messages: Turns | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    parse_special: bool = False
    cache_salt: Salt | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> SaveRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "pass either prompt or messages")
        if self.parse_special and self.messages is None:
            raise refusal("parse_special", "parse_special needs messages; leave it out, a prompt is always parsed")
        return self
