"""Sampling parameters, the tokens' weights, and the race between tokens. All backends of the op compute them bitwise
equally.

A weight is exp(logit / temperature) as a whole number, ``UNIT`` for the largest logit. Sums of whole numbers are exact,
so filters do not depend on the order of additions, on the batch or on the backend.

A token is sampled by an exponential race: each token has an exponentially distributed number of its own, which is
divided by the token's weight. The token with the least quotient is sampled, which happens in proportion to weights. The
numbers depend on the random number of the row and on the token id alone. So two rows with nearly the same probabilities
and the same random number nearly always sample the same token (Gumbel coupling), as drafts do.

Weights and races are computed with unfused float32 additions and multiplications, which have the same results on all
devices. The exponential functions and logarithms of libraries do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.sampling import WORD, mix

PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "random")
"""Columns of the parameters. They are float64, which represents probabilities, all counts and 32-bit numbers."""

COLDEST = 2.0**-16
"""Sampling at temperatures up to this is greedy, because dividing by such a temperature could overflow. Kernels may use
float32, which represents this number exactly."""

LARGEST = torch.finfo(torch.float32).max
"""NaN and +inf logits are replaced by this number. The sampled token of such a row is arbitrary, but in the
vocabulary."""

UNIT_BITS = 40
UNIT = 2**UNIT_BITS
"""The weight of the largest logit. In a vocabulary of 2**18, all tokens with weights below 1 have, together, less than
2**-22 of the probability. A sum of 2**18 weights is at most 2**58."""

ROUND = 1.5 * 2**23
"""The sum of this and a nonnegative float32 below 2**22 has the rounded number in its lowest bits."""

MAX_OCTAVES = 63.0
"""Maximum number of halvings of a weight, because an int64 can be shifted by at most 63 bits. After 41 halvings, a
weight is below 1, and so becomes 0."""

LOG2E = 1.44269502162933349609375
"""log2(e) as a float32."""

MANTISSA_BITS = 21
MANTISSA = (
    2.0**MANTISSA_BITS, -1453634.625, 503782.9375, -116407.3203125, 20282.6328125, -2781.81494140625,
)  # fmt: skip
"""Coefficients, all float32, of a polynomial for 2**(21 - f) with f in [-1/2, 1/2]. Of the polynomials that are exact
at 0, it has the least relative error, 9e-8. With rounding, the relative error of a weight is at most 5e-7."""

LOG2 = (
    1.4426950216293335, -0.7213529348373413, 0.4809158742427826, -0.36022335290908813, 0.28731274604797363,
    -0.24932153522968292, 0.2324782907962799, -0.14237648248672485,
)  # fmt: skip
"""Coefficients, all float32, of a polynomial for log2(1 + f) / f with 1 + f from sqrt(1/2) to sqrt(2). Its relative
error is 3e-7 with rounding."""

ROOT_HALF, ONE = 0x3F3504F3, 0x3F800000
"""sqrt(1/2) and 1 as the bits of float32 numbers."""

TO_SHARE = 2.0**-32
"""Turns a 32-bit number into a share of 1."""

NEAR = 0.25
"""Up to this share, the logarithm of the rest is computed from the share, without rounding the rest."""

CANDIDATES = 8192
"""Number of logits per row for which a backend has scratch memory. The memory holds the last candidates for the logit
at which a filter ends."""

SCRATCH_BYTES = 4 * CANDIDATES + 8 * len(PARAMETERS)
"""Device bytes that sampling needs per row, besides logits and tokens."""


def octaves_of(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Returns how often the weights of float32 logits [...] are halved, beside the largest: float32 [...], from 0 to
    ``MAX_OCTAVES``.

    Args:
        logits: at most ``largest``, without NaN.
        largest: float32 [], finite.
        temperature: above ``COLDEST``.
    """
    scale = float(torch.tensor(1 / temperature, dtype=torch.float32) * LOG2E)  # both factors are float32
    return (largest - logits).mul_(scale).clamp_(max=MAX_OCTAVES)


def token_weights(octaves: Tensor) -> Tensor:
    """Returns the weights of tokens from ``octaves_of``: int64 [...], from 0 to ``UNIT``. A logit of -inf has weight
    0."""
    rounded = octaves + ROUND
    whole = rounded.view(torch.int32) & 63
    part = octaves - (rounded - ROUND)
    value = part * MANTISSA[-1]
    for coefficient in MANTISSA[-2:0:-1]:
        value.add_(coefficient).mul_(part)
    mantissa = value.add_(MANTISSA[0] + ROUND).view(torch.int32) & (2**22 - 1)
    return (mantissa.long() << UNIT_BITS - MANTISSA_BITS) >> whole


def race_numbers(random: int, mixed: Tensor) -> Tensor:
    """Returns the random numbers of tokens in a row's race: int64 [...], from 0 to 2**32 - 1.

    Args:
        random: the row's random number, from 0 to 2**32 - 1.
        mixed: int64 [...], token ids after ``mix``.
    """
    return mix(mixed ^ random)


def arrivals(numbers: Tensor, octaves: Tensor) -> Tensor:
    """Returns when tokens arrive in the race, as base-2 logarithms: float32 [...].

    A ``number``, from 0 to 2**32 - 1, is the share of an exponential distribution below the token's own number E:
    E = -log2(1 - share). The token arrives at E * 2**octaves.
    """
    share, rest = ((word.float() + 0.5) * TO_SHARE for word in (numbers, WORD - numbers))
    own = torch.where(share < NEAR, share * _log2_ratio(-share), -_log2(rest))
    return _log2(own) + octaves


def _log2(x: Tensor) -> Tensor:
    """Logarithms of positive float32 numbers that are not subnormal."""
    bits = x.view(torch.int32) + (ONE - ROOT_HALF)
    part = ((bits & 0x7FFFFF) + ROOT_HALF).view(torch.float32) - 1
    return part * _log2_ratio(part) + ((bits >> 23) - 127).float()


def _log2_ratio(part: Tensor) -> Tensor:
    """log2(1 + part) / part."""
    value = torch.full_like(part, LOG2[-1])
    for coefficient in LOG2[-2::-1]:
        value.mul_(part).add_(coefficient)
    return value
