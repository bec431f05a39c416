"""``ThinkingBudget``: ends an answer's thoughts after ``thinking_token_budget`` tokens. The sampler asks it before each
token."""

from __future__ import annotations

from collections.abc import Sequence

BEGIN, END = "<think>", "</think>"
"""Tokens that begin and end thoughts."""

PROMPT_END = 16
"""Number of a prompt's last tokens that are searched for ``BEGIN``, which some chat templates write."""


class ThinkingBudget:
    """The budget of one answer's thoughts (``Thoughts``).

    Args:
        tokens: ids of ``BEGIN`` and ``END``.
        budget: maximum number of tokens between ``BEGIN`` and ``END``.
        prompt: token ids of the prompt, which can end with ``BEGIN``.
    """

    def __init__(self, tokens: tuple[int, int], budget: int, prompt: Sequence[int]) -> None:
        (self._begin, self._end), self._budget = tokens, budget
        last = next((token for token in reversed(prompt[-PROMPT_END:]) if token in tokens), None)
        self._start = 0 if last == self._begin else None
        self._is_over = False

    def next_token(self, tokens: Sequence[int]) -> int | None:
        """Returns the id of ``END`` if it must follow the answer's ``tokens``. Returns None if any token can follow."""
        if self._is_over:
            return None
        last = tokens[-1] if tokens else None
        if self._start is None and last == self._begin:
            self._start = len(tokens)
        if self._start is None:
            return None
        self._is_over = last == self._end
        return self._end if not self._is_over and len(tokens) - self._start >= self._budget else None
