"""A request on its way through the engine, and what the engine reports about it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shadowkv.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shadowkv.engine.constraint import Constraint
    from shadowkv.engine.selections import TokenSelections
    from shadowkv.prefix_cache.device.matches import Prompt


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one step: of the chosen token, and of the most likely ones (token id to value)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass
class RequestTimes:
    """When things happened to a request, in seconds of ``time.monotonic``; None until then."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to a request.

    Attributes:
        text: the new text (may be empty while a character or a stop string is incomplete).
        token_ids: the new tokens.
        logprobs: one per new token, if requested.
        finish_reason: ``stop``, ``length`` or ``error``; None while it is running.
        error: what went wrong, where the reason is ``error``.
        times: of the request so far.
        prompt_logprobs: one per prompt token, None for the first, on the first output, if requested.
        prompt_tokens, completion_tokens, cached_tokens: counts so far; cached ones are prompt tokens not recomputed.
        stop_string: the request's stop string that ended the text, on the last output, if one did.
        selections: what each new token attended to, if requested; None for the first, which prefill chose.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    times: RequestTimes
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_string: str | None = None
    selections: list[TokenSelections | None] | None = None


@dataclass(eq=False)
class Request:
    """One prompt to be continued.

    Attributes:
        prompt: what is looked up in the prefix cache; None where nothing of it is looked up or kept.
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
    looked_up: bool = True
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
