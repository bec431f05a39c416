"""A request on its way through the engine, its text as tokens arrive, and what the engine reports about it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shadowkv.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

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


class Constraint(Protocol):
    """Which tokens may come next in a request's answer, as far as it has come."""

    def mask(self, logits: Tensor) -> None:
        """Sets the logits [V] of tokens that may not come next to -inf, in place."""

    def accept(self, token: int) -> bool:
        """Accepts the chosen token; False if it may not come next."""

    @property
    def complete(self) -> bool:
        """Whether nothing more may follow."""


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


class DecodeStream(Protocol):
    """Text of tokens one by one; never half a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """Text of one request. What might be the start of a stop string is held back until it is known not to be."""

    def __init__(self, stream: DecodeStream, stop: tuple[str, ...]) -> None:
        self._stream, self._stop = stream, stop
        self._held = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: ``stop_string``."""
        return self.stop_string is not None

    def push(self, token_id: int) -> str:
        """Text that is certain after one more token; sets ``stopped`` when a stop string is complete."""
        return self._release(self._stream.push(token_id))

    def finish(self) -> str:
        """The rest of the text, when generation has ended for another reason."""
        if self.stopped:
            return ""
        text = self._release(self._stream.flush())
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        text = self._held + text
        ends = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            place, self.stop_string = min(ends)
            self._held = ""
            return text[:place]
        keep = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest suffix of ``text`` that is a prefix of ``stop``."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if stop.startswith(text[-length:]):
                return length
        return 0
