"""Samples tokens without sorting in one Triton kernel. A program makes several passes over its row, which stays in the
L2 cache.

The first passes find the largest and the smallest logit, then the weight of all tokens. For top-k and then top-p, the
kernel searches for the lowest logit that the filter keeps, in a range of logits. Each pass counts or weighs the tokens
above three values, and so reduces the range to a quarter, until the tokens in the range fit in registers. A last pass
finds the kept token that arrives first.

Weights are whole numbers, so sums do not depend on the order of additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.sample_tokens import weights
from shadowkv.ops.sample_tokens.weights import CANDIDATES, PARAMETERS

BLOCK = 2048
"""Number of tokens read at a time in passes in which each thread has sums of its own. A thread reads four of them."""

LONG_BLOCK = 4096
"""Number of tokens read at a time in passes in which threads are synchronised after every block."""

BY_VALUE = 4
"""Number of passes that divide the range of values into four parts of equal width. Later passes divide it into four
parts that contain equally many floats. At most 16 of these later passes are needed."""

COLDEST = tl.constexpr(weights.COLDEST)
LARGEST = tl.constexpr(weights.LARGEST)
UNIT = tl.constexpr(float(weights.UNIT))
UP = tl.constexpr(weights.UNIT_BITS - weights.MANTISSA_BITS)
ROUND = tl.constexpr(weights.ROUND)
MAX_OCTAVES = tl.constexpr(weights.MAX_OCTAVES)
LOG2E = tl.constexpr(weights.LOG2E)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(coefficient) for coefficient in weights.MANTISSA)
L0, L1, L2, L3, L4, L5, L6, L7 = (tl.constexpr(coefficient) for coefficient in weights.LOG2)
ROOT_HALF, ONE = tl.constexpr(weights.ROOT_HALF), tl.constexpr(weights.ONE)
TO_SHARE, NEAR = tl.constexpr(weights.TO_SHARE), tl.constexpr(weights.NEAR)


def sample_tokens(logits: Tensor, parameters: Tensor) -> Tensor:
    """Same as the reference."""
    batch, size = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch:
        candidates = torch.empty(batch, CANDIDATES, dtype=torch.float32, device=logits.device)
        _sample_tokens[(batch,)](
            logits,
            logits.stride(0),
            parameters.contiguous(),
            candidates,
            tokens,
            size,
            COLUMNS=len(PARAMETERS),
            CANDIDATES=candidates.shape[1],
            BY_VALUE=BY_VALUE,
            BLOCK=BLOCK,
            LONG_BLOCK=LONG_BLOCK,
            num_warps=16,
            enable_fp_fusion=False,  # fused multiply-adds round differently
        )
    return tokens


@triton.jit
def _sample_tokens(
    logits,
    row_stride,
    parameters,
    candidates,
    tokens,
    size,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BY_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    LONG_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    candidates += row * CANDIDATES
    parameters += row * COLUMNS
    temperature = tl.load(parameters)
    top_k, top_p = tl.load(parameters + 1).to(tl.int64), tl.load(parameters + 2)
    min_p, random = tl.load(parameters + 3), tl.load(parameters + 4).to(tl.int64).to(tl.uint32)
    smallest, largest, sampled = _extent(logits, size, BLOCK)
    if (temperature > COLDEST) & (largest > float("-inf")):
        scale = (1 / temperature).to(tl.float32) * LOG2E
        # ``low`` is below the logits of all tokens with a nonzero weight.
        high = _order(largest).to(tl.int64)
        low = tl.maximum(_order(largest - 42 / scale).to(tl.int64), _order(smallest).to(tl.int64) - 1)
        low = tl.minimum(low, high - 1)
        count, total = _measure(logits, size, largest, scale, _value(low), BLOCK)
        least, ties, kept = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        for by_mass in range(2):  # top-k, then top-p of the kept tokens
            if by_mass == 0:
                target, filters = top_k, (top_k > 0) & (top_k < count)
            else:
                target, filters = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), top_p < 1
            if filters:
                least, ties, kept, total = _enclose(
                    logits, size, largest, scale, low, high, count, target, by_mass != 0, candidates, CANDIDATES,
                    BY_VALUE, BLOCK, LONG_BLOCK,
                )  # fmt: skip
        end = size
        if kept < ties:
            end = _end_of_ties(logits, size, least, kept, LONG_BLOCK)
        lightest = tl.ceil(min_p * UNIT).to(tl.int64)
        sampled = _sample(logits, size, largest, scale, least, end, lightest, random, BLOCK)
    tl.store(tokens + row, sampled.to(tl.int64))


@triton.jit
def _load(logits, start, size, BLOCK: tl.constexpr):
    """Token ids and their logits, -inf beyond the vocabulary."""
    token = start + tl.arange(0, BLOCK)
    logit = tl.load(logits + token, mask=token < size, other=float("-inf"))
    return token, tl.where(logit < LARGEST, logit, LARGEST)


@triton.jit
def _weight(logit, largest, scale):
    return _weight_of(tl.minimum((largest - logit) * scale, MAX_OCTAVES))


@triton.jit
def _weight_of(octaves):
    """``weights.token_weights``, with the same operations."""
    rounded = octaves + ROUND
    part = octaves - (rounded - ROUND)
    value = ((((part * C5 + C4) * part + C3) * part + C2) * part + C1) * part + (C0 + ROUND)
    mantissa = value.to(tl.int32, bitcast=True) & 0x3FFFFF
    return (mantissa.to(tl.int64) << UP) >> (rounded.to(tl.int32, bitcast=True) & 63).to(tl.int64)


@triton.jit
def _order(value):
    """Maps float32 values to consecutive int32 numbers in the same order. Both zeros become 0."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _value(order):
    """The inverse of ``_order``: the float32 value of an int64 number."""
    size = tl.abs(order).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(order < 0, -size, size)


@triton.jit
def _extent(logits, size, BLOCK: tl.constexpr):
    """The smallest and the largest logit, and the first token with the largest."""
    worst, best = tl.full([BLOCK], float("inf"), tl.float32), tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        token, logit = _load(logits, start, size, BLOCK)
        at = tl.where(logit > best, token, at)
        best = tl.maximum(logit, best)
        worst = tl.minimum(tl.where(token < size, logit, float("inf")), worst)
    largest = tl.max(best)
    return tl.min(worst), largest, tl.min(tl.where(best == largest, at, size))


@triton.jit
def _measure(logits, size, largest, scale, above, BLOCK: tl.constexpr):
    """Returns the number of tokens whose logit is above ``above``, and their weight."""
    count, mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        _, logit = _load(logits, start, size, BLOCK)
        count += (logit > above).to(tl.int32)
        mass += tl.where(logit > above, _weight(logit, largest, scale), 0)
    return tl.sum(count).to(tl.int64), tl.sum(mass)


@triton.jit
def _measure_three(logits, size, largest, scale, a, b, c, BLOCK: tl.constexpr):
    """``_measure`` for three values in one pass."""
    count_a, mass_a = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    count_b, mass_b = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    count_c, mass_c = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        _, logit = _load(logits, start, size, BLOCK)
        weight = _weight(logit, largest, scale)
        count_a += (logit > a).to(tl.int32)
        count_b += (logit > b).to(tl.int32)
        count_c += (logit > c).to(tl.int32)
        mass_a += tl.where(logit > a, weight, 0)
        mass_b += tl.where(logit > b, weight, 0)
        mass_c += tl.where(logit > c, weight, 0)
    counts = tl.sum(count_a).to(tl.int64), tl.sum(count_b).to(tl.int64), tl.sum(count_c).to(tl.int64)
    return counts[0], tl.sum(mass_a), counts[1], tl.sum(mass_b), counts[2], tl.sum(mass_c)


@triton.jit
def _between(low, high, quarters, by_value):
    """Returns the point ``quarters`` / 4 of the way from ``low`` to ``high``, measured by float value or by number.
    ``low``, ``high`` and the result are numbers from ``_order``. The result is at least ``low`` and below ``high``."""
    first, last = _value(low), _value(high)
    middle = _order(first + (last - first) * (0.25 * quarters)).to(tl.int64)
    middle = tl.where(by_value, middle, low + (high - low) * quarters // 4)
    return tl.minimum(tl.maximum(middle, low), high - 1)


@triton.jit
def _enclose(
    logits,
    size,
    largest,
    scale,
    low,
    high,
    count,
    target,
    by_mass,
    candidates,
    CANDIDATES: tl.constexpr,
    BY_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    LONG_BLOCK: tl.constexpr,
):
    """Finds the logit at which the number of tokens, counted from the largest logit down, reaches ``target``. With
    ``by_mass``, their weights are summed instead.

    The logit is above ``low`` and at most ``high``, which are given as numbers from ``_order``. ``count`` tokens have
    logits above ``low``.

    Returns:
        The logit; how many tokens have it; how many of these are needed to reach ``target``; and the total weight of
        all tokens up to the last needed one.
    """
    above, mass, turn = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), 0  # tokens above high, and their weight
    while (count - above > CANDIDATES) & (high - low > 1):
        a = _between(low, high, 1, turn < BY_VALUE)
        b = _between(low, high, 2, turn < BY_VALUE)
        c = _between(low, high, 3, turn < BY_VALUE)
        count_a, mass_a, count_b, mass_b, count_c, mass_c = _measure_three(
            logits, size, largest, scale, _value(a), _value(b), _value(c), BLOCK
        )
        over_a = tl.where(by_mass, mass_a, count_a) >= target
        over_b = tl.where(by_mass, mass_b, count_b) >= target
        over_c = tl.where(by_mass, mass_c, count_c) >= target
        above = tl.where(over_c, above, tl.where(over_b, count_c, tl.where(over_a, count_b, count_a)))
        mass = tl.where(over_c, mass, tl.where(over_b, mass_c, tl.where(over_a, mass_b, mass_a)))
        high = tl.where(over_c, high, tl.where(over_b, c, tl.where(over_a, b, a)))
        count = tl.where(over_c, count_c, tl.where(over_b, count_b, tl.where(over_a, count_a, count)))
        low = tl.where(over_c, c, tl.where(over_b, b, tl.where(over_a, a, low)))
        turn += 1
    if high - low > 1:
        _gather(logits, size, _value(low), _value(high), candidates, LONG_BLOCK)
        place = tl.arange(0, CANDIDATES)
        held = tl.load(candidates + place, mask=place < count - above, other=float("-inf"))
        order, weight = _order(held), _weight(held, largest, scale)
        measure = tl.where(by_mass, weight, 1)
        missing = target - tl.where(by_mass, mass, above)
        while high - low > 1:
            middle = low + (high - low) // 2
            over = tl.sum(tl.where(order > middle, measure, 0)) >= missing
            low = tl.where(over, middle, low)
            high = tl.where(over, high, middle)
        mass += tl.sum(tl.where(order > high, weight, 0))
        count = above + tl.sum((order >= high).to(tl.int32))
        above += tl.sum((order > high).to(tl.int32))
    least = _value(high)
    weight = _weight(least, largest, scale)
    taken = target - above
    if by_mass:
        taken = (target - mass + weight - 1) // weight
    return least, count - above, taken, mass + taken * weight


@triton.jit
def _gather(logits, size, low, high, candidates, BLOCK: tl.constexpr):
    """Writes the logits above ``low`` and up to ``high`` to ``candidates``, which all threads read."""
    found = 0
    for start in range(0, size, BLOCK):
        _, logit = _load(logits, start, size, BLOCK)
        inside = (logit > low) & (logit <= high)
        place = found + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(candidates + place, logit, mask=inside)
        found += tl.sum(inside.to(tl.int32))
    tl.debug_barrier()


@triton.jit
def _end_of_ties(logits, size, value, kept, BLOCK: tl.constexpr):
    """Returns the token id after the ``kept``-th token whose logit is ``value``."""
    before, start, end = tl.full([], 0, tl.int64), 0, size
    while before < kept:
        token, logit = _load(logits, start, size, BLOCK)
        tied = (logit == value).to(tl.int32)
        last = (tied > 0) & (before + tl.cumsum(tied, 0) == kept)
        end = tl.minimum(end, tl.min(tl.where(last, token + 1, size)))
        before += tl.sum(tied)
        start += BLOCK
    return end


@triton.jit
def _mix(x):
    """``sampling.mix`` of uint32 numbers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log2_ratio(part):
    return ((((((part * L7 + L6) * part + L5) * part + L4) * part + L3) * part + L2) * part + L1) * part + L0


@triton.jit
def _log2(x):
    bits = x.to(tl.int32, bitcast=True) + (ONE - ROOT_HALF)
    part = ((bits & 0x7FFFFF) + ROOT_HALF).to(tl.float32, bitcast=True) - 1
    return part * _log2_ratio(part) + ((bits >> 23) - 127).to(tl.float32)


@triton.jit
def _arrivals(random, token, octaves):
    """``weights.arrivals``, with the same operations."""
    number = _mix(_mix(token.to(tl.uint32)) ^ random)
    share = (number.to(tl.float32) + 0.5) * TO_SHARE
    rest = ((number ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * TO_SHARE
    own = tl.where(share < NEAR, share * _log2_ratio(-share), -_log2(rest))
    return _log2(own) + octaves


@triton.jit
def _sample(logits, size, largest, scale, least, end, lightest, random, BLOCK: tl.constexpr):
    """Returns the sampled token. A token is kept if its weight is at least ``lightest``, and its logit is above
    ``least``, or equal to ``least`` with a token id below ``end``."""
    first, at = tl.full([BLOCK], float("inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        token, logit = _load(logits, start, size, BLOCK)
        octaves = tl.minimum((largest - logit) * scale, MAX_OCTAVES)
        weight = _weight_of(octaves)
        keep = ((logit > least) | ((logit == least) & (token < end))) & (weight >= lightest) & (weight > 0)
        arrival = tl.where(keep, _arrivals(random, token, octaves), float("inf"))
        at = tl.where(arrival < first, token, at)
        first = tl.minimum(arrival, first)
    return tl.min(tl.where(first == tl.min(first), at, size))
