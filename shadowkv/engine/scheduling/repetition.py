"""Answers that repeat themselves."""

from __future__ import annotations

import numpy as np

from shadowkv.engine.sampling_params import RepetitionDetectionParams


class Repetition:
    """Tells, token by token, whether an answer ends with a pattern that is repeated.

    An answer ends with a pattern of n tokens c times exactly if each of its last n (c - 1) tokens is the one n before
    it. So one count per n is enough: for how many tokens that has been so.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        least, most = max(1, params.min_pattern_size), params.max_pattern_size
        sizes = np.arange(least, most + 1)
        self._first = least - 1
        self._recent = np.full(most, -1, np.int64)  # the last tokens, the newest first
        self._equal = np.zeros(len(sizes), np.int64)
        self._enough = sizes * (params.min_count - 1)

    def take(self, token: int) -> bool:
        """Whether the answer repeats itself with this token."""
        self._equal = np.where(self._recent[self._first :] == token, self._equal + 1, 0)
        self._recent[1:] = self._recent[:-1].copy()
        self._recent[:1] = token
        return bool((self._equal >= self._enough).any())
