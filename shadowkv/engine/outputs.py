"""What an engine says of a request after each step, in tokens; and the same once the tokens are text.

These are what goes from the engine's process to those that serve clients, so they are structures that msgspec encodes.
Needs neither NumPy nor PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

NOTHING_FOLLOWS = "the JSON schema or grammar has come to where nothing can follow; make it less strict"
"""The error of a request whose rules end nowhere."""

ErrorCode = Literal["nothing_follows", "timeout"]
"""Errors that are a request's own: its rules end nowhere, or following them takes too long."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities at one step: of the chosen token, and of the most likely ones (token id to value)."""

    token_id: int
    logprob: float
    top: dict[int, float]


class RequestTimes(msgspec.Struct, array_like=True, gc=False):
    """When things happened to a request, in seconds of ``time.monotonic``; None until then."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True)
class LayerSelections:
    """Cells that a layer attended to most, in ascending order. It stands for a group of layers.

    Attributes:
        layers: the first of the group, and the one after the last.
        layer: the one that was looked at.
        cells: numbers of cells; cell n holds the positions from ``n * cell`` on.
        weights: for each cell, the share of its selected tokens in the softmax over all that are selected, or over all
            tokens but those of ``exact`` where everything is attended to: a mean over query heads.
    """

    layers: tuple[int, int]
    layer: int
    cells: list[int]
    weights: list[float]


@dataclass(frozen=True)
class TokenSelections:
    """What the decode step that chose a token attended to.

    Attributes:
        length: tokens before the one that was chosen.
        cell: tokens of a cell.
        everything: whether all of them were attended to: the sequence is dense, or the policy does not select.
        exact: ranges of positions [first, end) that every layer attended to in addition: the sink, and the newest
            tokens. Outliers, which policies may keep exact as well, are not reported. Where everything was attended to,
            the first and the newest tokens, which always get much of it.
        groups: by group of layers, where the attention to the rest went: to what was selected of it, or to all of it.
            Without cells where there is no rest.
    """

    length: int
    cell: int
    everything: bool
    exact: list[tuple[int, int]]
    groups: list[LayerSelections]


class TokenOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step added to a request.

    Attributes:
        token_ids: the new tokens.
        finish_reason: ``stop``, ``length``, ``repetition`` or ``error``; None while it is running.
        end_token: whether the last token ends the answer and is no part of its text.
        error, error_code: what went wrong, where the reason is ``error``; the code where it is the request's own fault.
        prompt_tokens, completion_tokens, cached_tokens: counts so far; cached ones are prompt tokens not recomputed.
        times: of the request so far.
        logprobs: one per new token, if requested.
        prompt_logprobs: one per prompt token, None for the first, on the first output, if requested.
        selections: what each new token attended to, if requested; None for the first, which prefill chose.
        prefilled: tokens of the prompt that are in the cache, found there or computed, if requested: on outputs without
            tokens while the prompt is computed, and on that of the first token.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    times: RequestTimes
    end_token: bool = False
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    selections: list[TokenSelections | None] | None = None
    prefilled: int | None = None
    error_code: ErrorCode | None = None

    @property
    def is_progress(self) -> bool:
        """Whether it says only how far the prompt has come."""
        return self.prefilled is not None and not self.token_ids and self.finish_reason is None


@dataclass
class TextOutput:
    """What was added to a request since the last such output, by one step or by several.

    Attributes:
        text: the new text (may be empty while a character or a stop string is incomplete).
        stop_string: the request's stop string that ended the text, on the last output, if one did.
        stop_reason: that, or the request's stop token that ended it, or ``repetition_detected``, as in vLLM.
        token_ids, logprobs, finish_reason, error, error_code, prompt_tokens, completion_tokens, cached_tokens, times,
            prompt_logprobs, selections, prefilled: as in ``TokenOutput``.
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
    prefilled: int | None = None
    error_code: ErrorCode | None = None
    stop_reason: str | int | None = None

    @property
    def is_progress(self) -> bool:
        """Whether it says only how far the prompt has come."""
        return self.prefilled is not None and not self.token_ids and self.finish_reason is None
