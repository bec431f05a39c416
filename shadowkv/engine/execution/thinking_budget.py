"""Thoughts that are ended once they have as many tokens as a request allows."""

from __future__ import annotations

from collections.abc import Sequence

BEGIN, END = "<think>", "</think>"
"""Tokens around thoughts."""

PROMPT_END = 16
"""Final tokens of a prompt that are searched for the beginning of thoughts, which some chat templates write."""


class ThinkingBudget:
    """The thoughts of one answer.

    Args:
        tokens: ids of ``BEGIN`` and ``END``.
        budget: most tokens between them.
        prompt: token ids; its end may begin the thoughts.
    """

    def __init__(self, tokens: tuple[int, int], budget: int, prompt: Sequence[int]) -> None:
        (self._begin, self._end), self._budget = tokens, budget
        last = next((token for token in reversed(prompt[-PROMPT_END:]) if token in tokens), None)
        self._start = 0 if last == self._begin else None
        self._is_over = False

    def next_token(self, tokens: Sequence[int]) -> int | None:
        """As for any ``Thoughts``; is asked before each token of the answer."""
        if self._is_over:
            return None
        last = tokens[-1] if tokens else None
        if self._start is None and last == self._begin:
            self._start = len(tokens)
        if self._start is None:
            return None
        self._is_over = last == self._end
        return self._end if not self._is_over and len(tokens) - self._start >= self._budget else None
