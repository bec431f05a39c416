"""Sampling parameters, and the tokens' weights, which all backends of the op compute bitwise equally.

A weight is exp(logit / temperature) as a whole number, ``UNIT`` for the largest logit. Sums of whole numbers are exact,
so samples do not depend on the order of additions, on the batch or on the backend. Weights are computed with unfused
float32 additions and multiplications, which have the same results on all devices. The exponential functions of
libraries do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "uniform")
"""Columns of the parameters. They are float64, which represents probabilities and all counts."""

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

CANDIDATES = 8192
"""Number of logits per row for which a backend has scratch memory. The memory holds the last candidates for the logit
at which a filter ends."""

SCRATCH_BYTES = 4 * CANDIDATES + 8 * len(PARAMETERS)
"""Device bytes that sampling needs per row, besides logits and tokens."""


def token_weights(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Returns the weights of float32 logits [...]: int64 [...], from 0 to ``UNIT``.

    Args:
        logits: at most ``largest``, without NaN. -inf has weight 0.
        largest: float32 [], finite.
        temperature: above ``COLDEST``.
    """
    scale = float(torch.tensor(1 / temperature, dtype=torch.float32) * LOG2E)  # both factors are float32
    octaves = (largest - logits).mul_(scale).clamp_(max=MAX_OCTAVES)
    rounded = octaves + ROUND
    whole = rounded.view(torch.int32) & 63
    part = octaves.sub_(rounded - ROUND)
    value = part * MANTISSA[-1]
    for coefficient in MANTISSA[-2:0:-1]:
        value.add_(coefficient).mul_(part)
    mantissa = value.add_(MANTISSA[0] + ROUND).view(torch.int32) & (2**22 - 1)
    return (mantissa.long() << UNIT_BITS - MANTISSA_BITS) >> whole
