"""Models of the OpenAI API's responses. They only describe responses in the OpenAPI schema: the server writes responses
as plain objects, and does not validate them against these models."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from shadowkv.serve.http.routing import Answer

Kind = TypeVar("Kind", bound=str)
Choice = TypeVar("Choice", bound=BaseModel)


class PromptTokensDetails(Answer):
    """Details of a prompt's tokens: how many were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Details of an answer's tokens: how many are reasoning, and how many were drafted and accepted or rejected."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Quality(Answer):
    """What the quality meter has found. ``checked_tokens`` says for how many tokens of the answers a quarter of the
    budget was tried. ``kl`` is their mean KL(budget || quarter of it) in nats, null if there are none."""

    checked_tokens: int
    kl: float | None


class Usage(Answer):
    """Token counts. ``completion_tokens_details`` is present if the server separates reasoning from text, or if the
    request has a ``prediction``; ``quality`` if the request has ``return_quality``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    quality: Quality | None = None


class KVTransfer(Answer):
    """``kv_transfer_params`` that a proxy passes on to a decode server. An answer has them only if the request asks for
    them."""

    do_remote_prefill: Literal[True]
    do_remote_decode: Literal[False]
    remote_snapshots: list[str]


class RequestMetrics(Answer):
    """Times of an answer in milliseconds. Answers have them only with ``--enable-per-request-metrics``."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float = 0.0
    tokens_per_second: float


class Timings(Answer):
    """Times of the first choice, in milliseconds, under llama.cpp's names. The first generated token counts as part of
    the prompt."""

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
    """Attention of one group of layers to selected tokens.

    ``layers`` is the range [first, end) of the group's layers. Only one of them is reported, ``layer``. ``cells`` are
    the numbers of the cells (``TokenSelections``) with the largest attention weights in that layer. ``weights`` are
    these cells' shares of the attention to all selected tokens.
    """

    layers: list[int]
    layer: int
    cells: list[int]
    weights: list[float]


class TokenSelections(Answer):
    """The tokens that one token of an answer attended to, out of the ``length`` tokens before it.

    Positions are grouped in cells. Cell n has ``cell`` tokens and starts at position n x ``cell``. ``exact`` lists
    ranges [first, end) of positions that every layer attended to without selection. ``groups`` has the attention to the
    remaining tokens. If ``everything`` is true, all remaining tokens were attended to, otherwise the selected ones.
    """

    length: int
    cell: int
    everything: bool
    exact: list[list[int]]
    groups: list[LayerSelections]


Selections = list[TokenSelections | None]
"""One entry per token. It is null for the first token, because that comes from prefill. An answer has these entries
only if the request sets ``return_selections``."""


class Generated(Answer, Generic[Kind, Choice]):
    """Texts generated for one request."""

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
    """Log-probability of a token at one position of a prompt. ``rank`` is null if the token is not among the reported
    most likely ones."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token: an object whose keys are the ids of this token and of the most likely ones. The entry of
the first token is null."""


class Ended(Answer):
    """How a choice ended. ``stop_reason`` is the stop string, the stop token or ``repetition_detected``.
    ``matched_stop`` is SGLang's field: ``stop_reason``, or the model's end token."""

    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | None


class CompletionLogprobs(Answer):
    """Log-probabilities of a text's tokens. If the text begins with the prompt, the values of the first token are
    null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ended):
    """One choice of a completion."""

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
    """A token's log-probability. ``bytes`` is null if the token is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ScoredToken(TokenLogprob):
    """A token of the answer with its most likely alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of a message's tokens."""

    content: list[ScoredToken]
    refusal: None


class CalledFunction(Answer):
    """The called function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """The assistant's message. ``content`` is null only if there are tool calls or reasoning."""

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
    """One choice of a chat completion."""

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
    """Answer of ``/v1/chat/completions/input_tokens``, an endpoint of llama.cpp."""

    input_tokens: int


class TokenPiece(Answer):
    """A token and its text."""

    id: int
    piece: str


class Tokenized(Answer):
    """Answer of ``/tokenize``. ``token_strs`` are the tokens as the vocabulary writes them, as in vLLM."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None


class Detokenized(Answer):
    """Answer of ``/detokenize``. ``prompt`` is vLLM's name of the text, and ``content`` is llama.cpp's. ``content`` is
    present if the request names no model, because llama.cpp's clients name none."""

    prompt: str
    content: str = ""


class RestoredPrompt(Answer):
    """Answer of ``/cache/restore``: the number of the prompt's tokens, the bytes of its files, and how many seconds the
    request took."""

    name: str
    tokens: int
    bytes: int
    seconds: float


class SavedPrompt(RestoredPrompt):
    """Answer of ``/cache/save``, with the same fields."""


class TokenizerInfo(BaseModel):
    """Answer of ``/tokenizer_info``. It also has a field for every special token that the tokenizer names."""

    eos_token: str | None
    vocab_size: int
    tokenizer_class: str
