"""Detects answers that repeat themselves (``repetition_detection``). The engine calls ``take`` for each token."""

from __future__ import annotations

import numpy as np

from shadowkv.engine.sampling_params import RepetitionDetectionParams


class Repetition:
    """Detects, token by token, whether an answer ends with a repeated pattern.

    An answer ends with c repeats of a pattern of n tokens exactly if each of its last n (c - 1) tokens equals the token
    n places before it. So one count per pattern size n is enough: the number of newest tokens for which this holds.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        least, most = max(1, params.min_pattern_size), params.max_pattern_size
        sizes = np.arange(least, most + 1)
        self._first = least - 1
        self._recent = np.full(most, -1, np.int64)  # the last tokens, the newest first
        self._equal = np.zeros(len(sizes), np.int64)
        self._enough = sizes * (params.min_count - 1)

    def take(self, token: int) -> bool:
        """Adds a token. Returns whether the answer now ends with a repeated pattern."""
        self._equal = np.where(self._recent[self._first :] == token, self._equal + 1, 0)
        self._recent[1:] = self._recent[:-1].copy()
        self._recent[:1] = token
        return bool((self._equal >= self._enough).any())
