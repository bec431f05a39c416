"""A request on its way through the engine, and why one is not served."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shadowkv.engine.outputs import RequestTimes
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.wording import counted

if TYPE_CHECKING:
    from torch import Tensor

    from shadowkv.prefix_cache.matches import Prompt


class Constraint(Protocol):
    """Which tokens may come next in a request's answer, as far as it has come."""

    failure: RequestError | None
    """Why the answer cannot go on; None if it can."""

    def start(self) -> None:
        """Has what may come first found, while the engine goes on."""

    def is_ready(self, seconds: float | None = 0.0) -> bool:
        """Whether it is known what may come next, or that the answer cannot go on; waits for that so long."""

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of tokens that may not come next to -inf, in place, if it is ready and has not failed."""

    def accept(self, token: int) -> bool:
        """Takes the chosen token and has found what may follow; False if it may not come next."""

    def close(self) -> None:
        """Says that the answer has ended."""


class Thoughts(Protocol):
    """The thoughts of a request's answer, as far as it has come."""

    def next_token(self, tokens: Sequence[int]) -> int | None:
        """The token that has to follow the answer's ``tokens``, to end the thoughts; None where any may."""


class Repetitions(Protocol):
    """What an answer's tokens repeat."""

    def take(self, token: int) -> bool:
        """Whether the answer repeats itself with this token."""


@dataclass(eq=False)
class Request:
    """One prompt to be continued.

    Attributes:
        allowed: ``allowed_token_ids`` on the device, once they are there.
        bad_words: token ids of texts that are not to be generated, by the token before their last one.
        thoughts: what ends thoughts that are too long; None where they have no limit.
        repetition: says whether the answer repeats itself; None where that does not matter.
        prompt: what is looked up in the prefix cache; None where nothing of it is looked up or kept.
        tenant: who it is for, among whom the scheduler shares fairly: an API key, an address, or "" for one of no name.
        priority: where the scheduling policy is ``priority``, lower numbers go first.
        looked_up: whether its prefixes are looked up; otherwise all of it is computed and then kept.
        passed: version of the prefix cache at which shorter prompts were taken before it.
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
    passed: int = -1

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def capacity(self) -> int:
        """Most tokens that can ever be in the cache: the last one sampled never is."""
        return len(self.prompt_token_ids) + max(1, self.max_tokens) - 1


class RequestError(ValueError):
    """A request that could never be served; ``param`` names the parameter at fault, or is None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SchemaTimeout(RequestError):
    """A request with a JSON schema that takes too long to compile."""


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for, of an engine with memory for it.

    Attributes:
        vocab_size: of the model.
        max_model_len: tokens of a prompt with its answer.
        default_max_tokens: of an answer, where a request does not say.
        max_logprobs: alternatives that may be reported of a token; -1 is all of the vocabulary.
        thinking_tokens: ids of the tokens around thoughts; None where there are none.
    """

    vocab_size: int
    max_model_len: int
    default_max_tokens: int
    max_logprobs: int = 20
    thinking_tokens: tuple[int, int] | None = None

    def max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens a request may generate: what it asks for, or the default as far as the context has room."""
        if params.max_tokens is not None:
            return params.max_tokens
        return max(1, min(self.default_max_tokens, self.max_model_len - prompt_tokens))

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises RequestError for a request that could never be served, whatever its JSON schema."""
        named: dict[str, Collection[int]] = {
            "prompt": prompt_token_ids,
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logprob_token_ids": params.logprob_token_ids or (),
        }
        for name, ids in named.items():
            for token in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= token < self.vocab_size:
                    raise RequestError(f"token id {token} is not in this model's vocabulary of {self.vocab_size}", name)
        self._check_logprobs(params)
        if params.thinking_token_budget is not None and self.thinking_tokens is None:
            reason = "needs a model whose thoughts are between the tokens <think> and </think>, which this one has not"
            raise RequestError(f"thinking_token_budget {reason}", "thinking_token_budget")
        if params.rules is not None and (params.min_tokens or params.ignore_eos):
            raise RequestError(
                "a JSON schema or grammar says where the output ends: no min_tokens or ignore_eos with it",
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


class EngineDead(RuntimeError):
    """The engine has ended; no request can be served."""


class EngineStopped(EngineDead):
    """It has ended because it was stopped."""


class EngineBusy(RuntimeError):
    """The queue of waiting requests is full."""
