"""Samples tokens in PyTorch without sorting the vocabulary: ranges of logits are narrowed down as in radix
selection."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from shadowkv.ops.sample_tokens.weights import (
    COLDEST,
    LARGEST,
    TO_SHARE,
    UNIT,
    arrivals,
    octaves_of,
    race_numbers,
    token_weights,
)
from shadowkv.ops.sampling import mix

BUCKETS = 2048
"""Number of buckets into which a range of logits is divided."""

SORTED = 512
"""Up to this many tokens are sorted. More are divided into buckets."""


def sample_tokens(logits: Tensor, parameters: Tensor) -> Tensor:
    """Samples one token per row from the tokens that the filters keep.

    A row is ordered by its logits, largest first, with ties in order of token id. In that order, the filters keep

    - the first ``top_k`` tokens,
    - of these, after a softmax over them, the shortest prefix with a total probability of at least ``top_p``, and
    - of these, the tokens that are at least ``min_p`` times as likely as the first.

    Of the kept tokens, the one that arrives first in the row's race is sampled (``weights.arrivals``); of several that
    arrive together, the one with the least token id. The sampled token depends on its row alone, and is the same in
    every backend.

    Args:
        logits: float32 [B, V], V from 1 to 2**22, rows contiguous. -inf is never sampled if any logit is finite.
        parameters: float64 [B, 5], with the columns of ``weights.PARAMETERS``. temperature: at most 100; up to
            ``weights.COLDEST`` it selects the largest logit, whatever the other parameters are. top_k: a whole number,
            ignored unless it is above 0 and below V. top_p: in (0, 1]. min_p: in [0, 1]. random: a whole number
            from 0 to 2**32 - 1.

    Returns:
        int64 [B], always in [0, V). The token of a row with NaN or +inf is arbitrary.
    """
    sampled = [_sample(row, *numbers) for row, numbers in zip(logits, parameters.tolist(), strict=True)]
    return torch.stack(sampled) if sampled else torch.empty(0, dtype=torch.int64, device=logits.device)


def _sample(logits: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, random: float) -> Tensor:
    largest = logits.amax()
    if not largest <= LARGEST:
        logits = torch.where(logits < LARGEST, logits, LARGEST)
        largest = logits.amax()
    if temperature <= COLDEST or largest == float("-inf"):
        return logits.argmax()
    octaves = octaves_of(logits, largest, temperature)
    weights = token_weights(octaves)
    if 0 < top_k < int(weights.count_nonzero()):
        weights *= _leading(logits, weights > 0, (weights > 0).long(), int(top_k))
    if top_p < 1:
        target = math.ceil(top_p * float(weights.sum()))
        weights *= _leading(logits, weights > 0, weights, target)
    if min_p:
        weights *= weights >= math.ceil(min_p * UNIT)
    return _first(weights, octaves, int(random))


def _first(weights: Tensor, octaves: Tensor, random: int) -> Tensor:
    """The token with a weight that arrives first. An exponentially distributed number is at least as large as its
    share, so most tokens are known to arrive after the heaviest one without logarithms."""
    numbers, heaviest = race_numbers(random, _mixed_ids(len(weights), weights.device)), int(weights.argmax())
    latest = float(arrivals(numbers[heaviest], octaves[heaviest]).exp2())
    racing = (weights > 0) & (numbers * (TO_SHARE * UNIT) <= (weights + 1) * (1.01 * latest))
    racing[heaviest] = True
    tokens = racing.nonzero().squeeze(1)
    return tokens[arrivals(numbers[tokens], octaves[tokens]).argmin()]


@functools.lru_cache(maxsize=8)
def _mixed_ids(size: int, device: torch.device) -> Tensor:
    return mix(torch.arange(size, device=device))


def _leading(logits: Tensor, there: Tensor, measure: Tensor, target: int) -> Tensor:
    """Orders the tokens in ``there`` by descending logits. Marks the shortest prefix whose measures sum up to at least
    ``target``, bool [V].

    ``measure`` is int64 [V], 0 for tokens outside ``there``. ``target`` is at least 1.
    """
    # Tokens outside ``there`` are left out, because they may have a logit of -inf. The range of logits would then be
    # infinite, and the position of -inf in it NaN.
    values, measure = logits[there], measure[there]
    while len(values) > SORTED:
        high, low = values.amax(), values.amin()
        if low / 2 >= high / 2:
            break
        # Values are halved, because the difference of two large numbers can be infinite.
        bucket = ((high / 2 - values / 2) / (high / 2 - low / 2)).clamp_(max=1).mul_(BUCKETS - 1).int()
        sums = measure.new_zeros(BUCKETS).scatter_add_(0, bucket.long(), measure).cumsum(0)
        place = int(torch.searchsorted(sums, target))
        target -= int(sums[place - 1]) if place else 0
        inside = (bucket == place).nonzero().squeeze(1)
        values, measure = values[inside], measure[inside]
    values, order = values.sort(descending=True)
    measure = measure[order]
    place = int(torch.searchsorted(measure.cumsum(0), target))
    least = values[place]
    ties = int((values == least)[: place + 1].sum())
    tied = (logits == least) & there
    if int(tied.sum()) > ties:
        tied &= tied.cumsum(0) <= ties
    return (logits > least) | tied
