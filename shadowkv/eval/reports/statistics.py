"""Means with their standard errors, and paired differences with their 95 % intervals.

Values come in strata, one per task. Tasks are chosen and not drawn at random, so differences between the tasks' means
do not add to the standard error of the overall mean. If all tasks have equally many values, this standard error is
``sqrt(sum(error of a task ** 2)) / number of tasks`` (stratified sampling; Cochran, Sampling Techniques, section 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

RESAMPLES = 10_000

Estimate = tuple[float, float]
"""A mean and its standard error. The error is NaN for a single value."""


def mean_and_error(*strata: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of all values, and its standard error. The error is estimated from the deviations within strata,
    and is NaN for a single value."""
    groups = _with_spread(strata)
    count = sum(map(len, groups))
    mean = sum(map(sum, groups)) / count
    if count < 2:
        return mean, math.nan
    variance = 0.0  # variance of the sum of all values
    for values in groups:
        centre = sum(values) / len(values)
        variance += len(values) * sum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance) / count


def paired_interval(*strata: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the mean of paired differences, by Efron's percentile bootstrap.

    Each stratum is resampled separately, with a fixed seed. A single pair has no interval: (NaN, NaN).
    """
    arrays = [np.asarray(differences, np.float64) for differences in _with_spread(strata)]
    count = sum(map(len, arrays))
    if count < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    # Resamples are drawn 100 at a time, because all 10,000 resamples of thousands of pairs would take gigabytes.
    means = [
        sum(values[rng.integers(0, len(values), (100, len(values)))].sum(1) for values in arrays) / count
        for _ in range(RESAMPLES // 100)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def _with_spread(strata: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """Returns the strata if each has several values. A single value shows no deviation. So if a stratum has only one
    value, all values are returned as one stratum, which makes errors larger."""
    return strata if all(len(values) > 1 for values in strata) else [[value for values in strata for value in values]]


def rounded(numbers: tuple[float, float] | None) -> list[float | str]:
    """Returns two cells of a CSV. A cell is empty if there is no number."""
    return ["" if math.isnan(number) else round(number, 6) for number in numbers or (math.nan, math.nan)]


def markdown_table(note: str, table: Iterable[Sequence[str]]) -> str:
    """Returns a note and a table in Markdown. The table's first two lines are its head and the columns' alignment."""
    return "\n".join([note, "", *("| " + " | ".join(line) + " |" for line in table)]) + "\n"


def with_error(estimate: Estimate, scale: float, sign: str = "") -> str:
    """Returns an estimate times ``scale`` as text. With ``sign="+"``, positive numbers have a sign too."""
    mean, error = estimate
    return f"{scale * mean:{sign}.1f}" + ("" if math.isnan(error) else f" ± {scale * error:.1f}")
