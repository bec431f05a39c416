"""The output of a step for one request: in tokens (``TokenOutput``), and as text (``TextOutput``).

The engine process sends token outputs to the serving processes, encoded by msgspec. The module imports neither NumPy
nor PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

NOTHING_FOLLOWS = "the JSON schema or grammar has come to a point where nothing can follow; make it less strict"
"""The error of a request whose grammar allows no next token."""

ErrorCode = Literal["nothing_follows", "timeout"]
"""Errors of the request itself: its grammar allows no next token, or matching it takes too long."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities at one step.

    Attributes:
        token_id, logprob: the chosen token and its log-probability.
        top: log-probability by token id, of the most likely tokens or of the requested ones.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


class RequestTimes(msgspec.Struct, array_like=True, gc=False):
    """Times of a request's events, in seconds of ``time.monotonic``; None before the event."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class CheckedTokens(msgspec.Struct, array_like=True, gc=False):
    """Tokens that ``QualityMeter`` has checked.

    Attributes:
        tokens: their number.
        kl: sum over these tokens of KL(step || narrow step), in nats, of the next-token distributions.
    """

    tokens: int = 0
    kl: float = 0.0

    def add(self, kl: float) -> None:
        """Adds a token."""
        self.tokens += 1
        self.kl += kl


@dataclass(frozen=True)
class LayerSelections:
    """The cells with the largest attention weights in one layer of a group, in order of position. A cell is a range of
    ``TokenSelections.cell`` positions.

    Attributes:
        layers: the group's range of layers [first, end).
        layer: the reported layer, one of the group.
        cells: numbers of cells. Cell n begins at position ``n * TokenSelections.cell``.
        weights: the attention weight of each cell's selected tokens, a mean over query heads. The softmax is over all
            selected tokens. If ``TokenSelections.everything`` is True, it is over all tokens outside
            ``TokenSelections.exact``.
    """

    layers: tuple[int, int]
    layer: int
    cells: list[int]
    weights: list[float]


@dataclass(frozen=True)
class TokenSelections:
    """The tokens that the decode step of a chosen token attended to.

    Attributes:
        length: number of tokens before the chosen one.
        cell: number of tokens per cell.
        everything: whether the step attended to all tokens: the sequence is dense, or the policy does not select.
        exact: ranges of positions [first, end) that the weights leave out, because every layer attends to them: the
            sink and the newest tokens. Outliers are not reported.
        groups: for each group of layers, the weights of the selected tokens outside the ranges of ``exact``, or of all
            tokens outside these ranges if ``everything`` is True. A group without such tokens has no cells.
    """

    length: int
    cell: int
    everything: bool
    exact: list[tuple[int, int]]
    groups: list[LayerSelections]


class TokenOutput(msgspec.Struct, array_like=True, gc=False):
    """The output of one step for one request.

    Attributes:
        token_ids: the new tokens.
        finish_reason: ``stop``, ``length``, ``repetition`` or ``error``; None while the request runs.
        end_token: whether the last token is an end token, which is no part of the text.
        error: the message if ``finish_reason`` is ``error``.
        error_code: the kind of error if the request itself caused it; else None.
        prompt_tokens, completion_tokens: counts so far.
        cached_tokens: prompt tokens that the prefix cache had.
        times: times of the request's events.
        accepted_drafts, rejected_drafts: numbers of drafted tokens that were accepted and rejected so far.
        logprobs: one per new token, if requested.
        prompt_logprobs: one per prompt token, None for the first, if requested. The first output that does not only
            report progress (``is_progress``) has them.
        selections: one per new token, if requested; None for the answer's first token, which the prefill chose.
        prefilled: number of prompt tokens that are cached or computed so far, if requested (``return_progress``). It is
            set on outputs without tokens during the prefill, and on the output of the first token.
        checked: tokens that ``QualityMeter`` has checked so far; None if there are none.
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
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    checked: CheckedTokens | None = None

    @property
    def is_progress(self) -> bool:
        """Whether the output only reports the progress of the prefill."""
        return self.prefilled is not None and not self.token_ids and self.finish_reason is None


class TextOutput(TokenOutput, array_like=True, gc=False):
    """The output of one or several steps for one request, with text.

    Attributes:
        text: the new text. It can be empty while a character or a stop string is incomplete.
        stop_string: on the last output, the stop string that ended the text; else None.
        stop_reason: on the last output, as in vLLM: the stop string or the stop token that ended the text, or
            ``repetition_detected``; else None.
    """

    text: str = ""
    stop_string: str | None = None
    stop_reason: str | int | None = None
