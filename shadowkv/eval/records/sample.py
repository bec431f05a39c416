"""A question for a model, and what counts as an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One sample of a task.

    Attributes:
        task: name of its task, e.g. ``niah_single_1``.
        id: the same for every policy and every run with the same seed.
        turns: prompts, one per turn; the first holds the context. Plain text, tokenised unchanged.
        references: per turn, the texts that the metric compares the answer with.
        max_new_tokens: limit for every turn.
        metric: name in ``metrics.scoring.METRICS``.
        length: tokens of the longest sequence that the sample was made for, answers included.
    """

    task: str
    id: str
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    max_new_tokens: int
    metric: str
    length: int
