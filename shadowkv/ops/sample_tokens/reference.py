"""Samples tokens in PyTorch without sorting the vocabulary: ranges of logits are narrowed down as in radix
selection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shadowkv.ops.sample_tokens.weights import COLDEST, LARGEST, UNIT, token_weights

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

    The weights of the kept tokens are summed in order of token id. The sampled token is the first one with which the
    sum exceeds ``uniform`` times the total. The sampled token depends on its row alone. It is the same in every
    backend, because weights are whole numbers (``weights.py``).

    Args:
        logits: float32 [B, V], V from 1 to 2**22, rows contiguous. -inf is never sampled if any logit is finite.
        parameters: float64 [B, 5], with the columns of ``weights.PARAMETERS``. temperature: at most 100; up to
            ``weights.COLDEST`` it selects the largest logit, whatever the other parameters are. top_k: a whole number,
            ignored unless it is above 0 and below V. top_p: in (0, 1]. min_p: in [0, 1]. uniform: in [0, 1).

    Returns:
        int64 [B], always in [0, V). The token of a row with NaN or +inf is arbitrary.
    """
    sampled = [_sample(row, *numbers) for row, numbers in zip(logits, parameters.tolist(), strict=True)]
    return torch.stack(sampled) if sampled else torch.empty(0, dtype=torch.int64, device=logits.device)


def _sample(logits: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, uniform: float) -> Tensor:
    largest = logits.amax()
    if not largest <= LARGEST:
        logits = torch.where(logits < LARGEST, logits, LARGEST)
        largest = logits.amax()
    if temperature <= COLDEST or largest == float("-inf"):
        return logits.argmax()
    weights = token_weights(logits, largest, temperature)
    if 0 < top_k < int(weights.count_nonzero()):
        weights *= _leading(logits, weights > 0, (weights > 0).long(), int(top_k))
    if top_p < 1:
        target = math.ceil(top_p * float(weights.sum()))
        weights *= _leading(logits, weights > 0, weights, target)
    if min_p:
        weights *= weights >= math.ceil(min_p * UNIT)
    upto = weights.cumsum(0)
    total = int(upto[-1])
    return torch.searchsorted(upto, min(int(uniform * total), total - 1), right=True)


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
