"""Shapes of the answers, for the OpenAPI schema; answers are written as plain objects, not validated against these."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from shadowkv.serve.http.routing import Answer

Kind = TypeVar("Kind", bound=str)
Choice = TypeVar("Choice", bound=BaseModel)


class PromptTokensDetails(Answer):
    """How many of a prompt's tokens were found in the cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """How many of an answer's tokens are thoughts."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts; the last one where thoughts are told apart."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class KVTransfer(Answer):
    """What a proxy passes on to a decode server; only where a request asked for it."""

    do_remote_prefill: Literal[True]
    do_remote_decode: Literal[False]
    remote_snapshots: list[str]


class RequestMetrics(Answer):
    """How long an answer took, in milliseconds; only with ``--enable-per-request-metrics``."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float = 0.0
    tokens_per_second: float


class Timings(Answer):
    """How long a first choice's prompt and its tokens took, in milliseconds, by llama.cpp's names; its first token is
    the prompt's."""

    cache_n: int
    prompt_n: int
    predicted_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


FinishReason = Literal["stop", "length", "repetition"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "repetition"]


class LayerSelections(Answer):
    """Cells of tokens that a ``layer`` selected from, on behalf of the group of ``layers`` [first, end); and the shares
    of its attention to all that it selected."""

    layers: list[int]
    layer: int
    cells: list[int]
    weights: list[float]


class TokenSelections(Answer):
    """What a token of an answer attended to, out of the ``length`` tokens before it.

    Cell n has ``cell`` tokens, from position n x ``cell`` on. ``exact`` are runs [first, end) of positions that all
    layers attended to in addition. ``groups`` say where the attention to the others went: to those that were selected,
    or, with ``everything``, to all of them.
    """

    length: int
    cell: int
    everything: bool
    exact: list[list[int]]
    groups: list[LayerSelections]


Selections = list[TokenSelections | None]
"""One for each token; null for the first, which prefill chose. Only where ``return_selections`` asks for them."""


class Generated(Answer, Generic[Kind, Choice]):
    """Texts generated for one prompt."""

    id: str
    object: Kind
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    service_tier: None
    system_fingerprint: str
    kv_transfer_params: KVTransfer | None = None
    metrics: RequestMetrics | None = None
    timings: Timings


class PromptLogprob(Answer):
    """A token's log-probability at one place of a prompt; ``rank`` is null where it is not among the most likely ones
    that are reported."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, one for each token of a prompt, of which the first has none."""


class Ended(Answer):
    """What a choice says of its end: ``stop_reason`` is the stop string or token, or ``repetition_detected``;
    ``matched_stop``, which is SGLang's, that or the model's own token that ends answers."""

    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | None


class CompletionLogprobs(Answer):
    """Log-probabilities of a text's tokens; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ended):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    selections: Selections = Field([])


class Completion(Generated[Literal["text_completion"], CompletionChoice]):
    """Answer of ``/v1/completions``."""


class TokenLogprob(Answer):
    """A token's log-probability; null bytes mean part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ScoredToken(TokenLogprob):
    """A token of the answer, with the most likely alternatives in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of a turn's tokens."""

    content: list[ScoredToken]
    refusal: None


class CalledFunction(Answer):
    """What is called, and with what: ``arguments`` is JSON."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """The assistant's turn; without text only where there are calls or thoughts."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    tool_calls: list[ToolCall] = Field([])
    reasoning: str | None
    reasoning_content: str = ""


class ChatChoice(Ended):
    """One turn."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    selections: Selections = Field([])


class Verbose(Answer):
    """The prompt as the model reads it."""

    prompt: str


class ChatCompletion(Generated[Literal["chat.completion"], ChatChoice]):
    """Answer of ``/v1/chat/completions``."""

    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    verbose: Verbose | None = Field(None, alias="__verbose")


class InputTokens(Answer):
    """Answer of ``/v1/chat/completions/input_tokens``, which is llama.cpp's."""

    input_tokens: int


class TokenPiece(Answer):
    """A token and its text."""

    id: int
    piece: str


class Tokenized(Answer):
    """Answer of ``/tokenize``: ``token_strs`` are tokens as the vocabulary writes them, as in vLLM."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None


class Detokenized(Answer):
    """Answer of ``/detokenize``: the text by vLLM's name and, unless the request has a model, by llama.cpp's, whose
    requests have none."""

    prompt: str
    content: str = ""


class RestoredPrompt(Answer):
    """Answer of ``/cache/restore``: tokens of the prompt, bytes of the files that hold them, and seconds taken."""

    name: str
    tokens: int
    bytes: int
    seconds: float


class SavedPrompt(RestoredPrompt):
    """Answer of ``/cache/save``."""


class TokenizerInfo(BaseModel):
    """Answer of ``/tokenizer_info``, with every special token that the tokeniser names."""

    eos_token: str | None
    vocab_size: int
    tokenizer_class: str
