"""Means with their standard errors, and paired differences with their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def mean_and_error(scores: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error from the sample's deviation; NaN for a single score."""
    mean = sum(scores) / len(scores)
    if len(scores) < 2:
        return mean, math.nan
    variance = sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return mean, math.sqrt(variance / len(scores))


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of paired ``differences``: percentiles of the means of resamples (Efron's bootstrap).

    Deterministic. A single pair has no interval: (NaN, NaN).
    """
    if len(differences) < 2:
        return math.nan, math.nan
    values = np.asarray(differences, np.float64)
    rng = np.random.default_rng(0)
    # In slices: 10,000 resamples of thousands of pairs at once would take gigabytes.
    means = [values[rng.integers(0, len(values), (100, len(values)))].mean(1) for _ in range(RESAMPLES // 100)]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)
