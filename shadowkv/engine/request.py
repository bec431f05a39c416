"""``Request``, the engine's record of one prompt and its answer; the limits of requests, and their errors."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from shadowkv.engine.outputs import CheckedTokens, RequestTimes
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.wording import counted

if TYPE_CHECKING:
    from torch import Tensor

    from shadowkv.prefix_cache.matches import Prompt


class Constraint(Protocol):
    """The grammar state of one answer: which tokens can come next."""

    failure: RequestError | None
    """Why the answer cannot go on; None if it can."""

    def start(self) -> None:
        """Starts to compute the mask of the first token, in another process."""

    def is_ready(self, seconds: float | None = 0.0) -> bool:
        """Whether the next mask is ready or the constraint has failed. Waits up to ``seconds`` for it; None waits
        without a limit."""

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of forbidden next tokens to -inf, in place. Call it only when the mask is ready. Does
        nothing if the constraint has failed."""

    def accept(self, token: int) -> bool:
        """Adds the chosen token and starts to compute the next mask. False if the grammar forbids the token."""

    def close(self) -> None:
        """Ends the constraint, because the answer has ended."""


class Thoughts(Protocol):
    """The budget of an answer's thoughts."""

    def next_token(self, tokens: Sequence[int]) -> int | None:
        """Returns the token that must follow the answer's ``tokens`` to end the thoughts. Returns None if any token can
        follow."""


class Repetitions(Protocol):
    """Detects an answer that repeats itself."""

    def take(self, token: int) -> bool:
        """Adds a token. Returns whether the answer now repeats itself."""


@dataclass(eq=False)
class Request:
    """One prompt and its answer so far.

    Attributes:
        max_tokens: maximum number of output tokens; 0 only scores the prompt.
        stop_ids: tokens that end the answer.
        constraint: the grammar state of the answer; None without a grammar.
        prompt: the prompt for the prefix cache; None if the request does not use the prefix cache.
        tenant: an API key, an address, or "" without either. The scheduler is fair between tenants.
        priority: with ``scheduling_policy="priority"``, lower numbers go first.
        bad_words: forbidden words as token ids. A word's key is its second-last token, or None if the word has only one
            token.
        thoughts: ends thoughts that exceed their budget; None without a budget.
        repetition: detects an answer that repeats itself; None if not requested.
        looked_up: whether the prefix cache is searched for the prompt; else all tokens are computed and then cached.
        allowed: ``allowed_token_ids`` on the device; None until the sampler has copied them there.
        times: times of the request's events.
        cached_tokens: prompt tokens that the prefix cache had.
        accepted_drafts, rejected_drafts: numbers of drafted tokens that were accepted and rejected.
        checked: tokens that ``QualityMeter`` has checked.
        passed: version of the prefix cache at which shorter prompts last overtook this one; -1 if none has.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    prompt: Prompt | None = None
    tenant: str = ""
    priority: int = 0
    bad_words: Mapping[int | None, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    thoughts: Thoughts | None = None
    repetition: Repetitions | None = None
    looked_up: bool = True
    allowed: Tensor | None = None
    times: RequestTimes = field(default_factory=lambda: RequestTimes(time.monotonic()))
    output_token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    checked: CheckedTokens = field(default_factory=CheckedTokens)
    passed: int = -1

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt and of the output so far."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of this request that the cache can ever hold: all but the last output token."""
        return len(self.prompt_token_ids) + max(1, self.max_tokens) - 1


class RequestError(ValueError):
    """A request that can never be served. ``param`` names the parameter at fault, or is None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SchemaTimeout(RequestError):
    """A request with a JSON schema or grammar that takes too long to compile or match."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits on the parameters of requests. ``Scheduler.check_memory`` checks the memory.

    Attributes:
        vocab_size: number of token ids.
        max_model_len: maximum number of tokens of a prompt and its answer together.
        default_max_tokens: maximum number of tokens of an answer if the request sets no limit.
        max_logprobs: maximum number of alternatives to report per token; -1 is the whole vocabulary.
        thinking_tokens: ids of the tokens that begin and end thoughts; None if the model has none.
    """

    vocab_size: int
    max_model_len: int
    default_max_tokens: int
    max_logprobs: int = 20
    thinking_tokens: tuple[int, int] | None = None

    def max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Returns the maximum number of tokens that a request can generate: its own limit, or else the default, but not
        more than the prompt leaves room for."""
        if params.max_tokens is not None:
            return params.max_tokens
        return max(1, min(self.default_max_tokens, self.max_model_len - prompt_tokens))

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises RequestError for a request that can never be served. It does not check a JSON schema or grammar."""
        named: dict[str, Collection[int]] = {
            "prompt": prompt_token_ids,
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logprob_token_ids": params.logprob_token_ids or (),
            "predicted_token_ids": params.predicted_token_ids,
        }
        for name, ids in named.items():
            for token in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= token < self.vocab_size:
                    raise RequestError(f"token id {token} is not in this model's vocabulary of {self.vocab_size}", name)
        self._check_logprobs(params)
        if params.thinking_token_budget is not None and self.thinking_tokens is None:
            reason = "needs a model with the tokens <think> and </think>; this model has none"
            raise RequestError(f"thinking_token_budget {reason}", "thinking_token_budget")
        if params.rules is not None and (params.min_tokens or params.ignore_eos):
            raise RequestError(
                "min_tokens and ignore_eos cannot be combined with a JSON schema or grammar, which defines where the "
                "output ends",
                "response_format",
            )
        prompt_tokens, max_tokens = len(prompt_token_ids), self.max_tokens(len(prompt_token_ids), params)
        if not prompt_tokens:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if prompt_tokens + max_tokens > self.max_model_len:
            full = prompt_tokens >= self.max_model_len
            rest = ", which leaves no room for an answer" if full else f" and max_tokens asks for {max_tokens} more"
            raise RequestError(
                f"this model's maximum context length is {counted(self.max_model_len, 'token')}, but the prompt has "
                f"{counted(prompt_tokens, 'token')}{rest}",
                "prompt" if full else "max_tokens",
            )

    def _check_logprobs(self, params: SamplingParams) -> None:
        most = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        chosen = None if params.logprob_token_ids else params.logprobs
        for name, count in (("logprobs", chosen), ("prompt_logprobs", params.prompt_logprobs)):
            asked = self.vocab_size if count == -1 else count or 0
            if asked > most:
                every = f", all {asked} of the vocabulary," if count == -1 else ""
                raise RequestError(f"{name}={count}{every} is more than {most} (--max-logprobs)", name)


EngineState = Literal["ok", "stuck", "dead"]
"""State of an engine. One that is stuck is alive, but does not answer or does not end its step; it may go on later."""


class EngineDead(RuntimeError):
    """The engine has ended. It serves no more requests."""


class EngineStopped(EngineDead):
    """The engine has ended because it was stopped."""


class EngineBusy(RuntimeError):
    """The queue of waiting requests is full."""
