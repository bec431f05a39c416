"""What all backends of the op compute bitwise equally: a row's parameters, and the weights of its tokens.

A weight is exp(logit / temperature) in whole units, ``UNIT`` for the largest logit. Sums of whole numbers are exact, so
no sample depends on the order of additions, on the batch or on the backend; and unfused float32 additions and
multiplications are the same everywhere, unlike the exponentials of libraries.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "uniform")
"""Columns of the parameters, float64, which holds probabilities and counts of any size."""

COLDEST = 2.0**-16
"""Temperatures up to this are greedy: dividing by less could overflow. It is exact in float32, which kernels may
use."""

LARGEST = torch.finfo(torch.float32).max
"""What NaN and larger logits are replaced by: such a row's token has no meaning, but is in the vocabulary."""

UNIT_BITS = 40
UNIT = 2**UNIT_BITS
"""The weight of the largest logit. All tokens that weigh less than one unit have, together, less than 2**-22 of the
probability in a vocabulary of 2**18, and a sum of that many weights is below 2**58."""

ROUND = 1.5 * 2**23
"""Added to a nonnegative float32 below 2**22, this rounds it to a whole number in the lowest bits."""

MAX_OCTAVES = 63.0
"""Halvings are clamped to this number: from 41 on a weight is below one unit, and a shift is by at most 63 bits."""

LOG2E = 1.44269502162933349609375
"""log2(e) as a float32."""

MANTISSA_BITS = 21
MANTISSA = (
    2.0**MANTISSA_BITS, -1453634.625, 503782.9375, -116407.3203125, 20282.6328125, -2781.81494140625,
)  # fmt: skip
"""Coefficients of 2**(21 - f) for f in [-1/2, 1/2], all in float32: the polynomial of least relative error, 9e-8, that
is exact at 0. Including the rounding of its value, a weight is within 5e-7."""

CANDIDATES = 8192
"""Logits of a row that fit in a backend's scratch memory: the last candidates for the end of a filter."""

SCRATCH_BYTES = 4 * CANDIDATES + 8 * len(PARAMETERS)
"""Device bytes that sampling takes per row, besides logits and tokens."""


def token_weights(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Weights int64 [...], 0 to ``UNIT``, of float32 logits [...].

    Args:
        logits: none above ``largest``, and no NaN among them; -inf weighs nothing.
        largest: float32 [], finite.
        temperature: above ``COLDEST``.
    """
    scale = float(torch.tensor(1 / temperature, dtype=torch.float32) * LOG2E)  # each rounded to float32
    octaves = (largest - logits).mul_(scale).clamp_(max=MAX_OCTAVES)
    rounded = octaves + ROUND
    whole = rounded.view(torch.int32) & 63
    part = octaves.sub_(rounded - ROUND)
    value = part * MANTISSA[-1]
    for coefficient in MANTISSA[-2:0:-1]:
        value.add_(coefficient).mul_(part)
    mantissa = value.add_(MANTISSA[0] + ROUND).view(torch.int32) & (2**22 - 1)
    return (mantissa.long() << UNIT_BITS - MANTISSA_BITS) >> whole
