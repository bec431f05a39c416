"""Selects the top-k values, and samples the rest by weight (systematic sampling: Madow, 1949), for
``select_by_sketch``.

The top-k values are selected with probability 1, the others with a probability in proportion to their weight. The sum
of the selected terms, each divided by its probability, is an unbiased estimate of the sum of all terms. The more nearly
the weights are proportional to the terms, the better is the estimate.

Probabilities are multiples of a small unit, so that the selection does not depend on the order in which they are added.
They are rounded down, so that no more values are selected than wanted, and every selected value has room in the result.
Probabilities are weights divided by their sum, times the number of samples wanted. The sum of the weights is exact, or
its order of additions depends only on the backend, not on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MAX_BITS = 20
"""Probabilities are multiples of 2**-20, or of a larger unit if their sum would take more than 31 bits."""
CAUTION = 0.97
"""Expected number of samples, as a share of the number wanted. The CUDA kernel first gives all values of a bin the
weight of the bin's middle, so it may draw more samples than expected. The share is below 1 to leave room for them. If
the samples would still not fit, the kernel sums up the values' own weights instead."""
WEIGHT_BITS = 40
"""Weights are at most 1 and are summed in units of 2**-40. A sum of integers is the same in any order of additions, so
it does not depend on how wide a batch's rows are. Sums of up to 2**23 - 1 weights fit in 63 bits."""


@dataclass(frozen=True)
class Sampling:
    """How many chunks to sample besides the top-k chunks, and the seeds.

    Attributes:
        counts: int64 [B], chunks to sample for each kv head of a row.
        seeds: int64 [B], of which the low 32 bits are used. Rows with the same seed have the same random numbers in
            every process and batch.
    """

    counts: Tensor
    seeds: Tensor

    def uniform(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        """Returns two tensors of 32-bit random numbers, int64 [B, H], for one layer and its H = ``heads`` kv heads. The
        first samples runs (``sign_scores.reference.RUN`` tokens each), the second samples chunks."""
        head = torch.arange(heads, device=self.seeds.device)
        state = mix(self.seeds[:, None] * 0x9E3779B1 + (layer * heads + head))
        return mix(state), mix(state + 0x85EBCA77)


def systematic_sample(
    values: Tensor, top_k: Tensor, wanted: Tensor, factor: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Selects the largest values, and samples others by weights 2 ** (factor * value). -inf is never selected.

    Args:
        values: float16 [..., n].
        top_k: int64 [...], how many of the largest values are selected at most. Values whose first 11 bits are equal
            are all selected in this way, or none of them is.
        wanted: int64 [...], how many values are selected at most, including the sampled ones.
        factor: float32 [...], not negative.
        uniform: int64 [...], 32-bit random numbers.

    Returns:
        bool [..., n], the selected values, and float32 [..., n], the probabilities of all.
    """
    bits = (31 - torch.frexp(wanted.clamp(min=1).double()).exponent).clamp(max=MAX_BITS).long()[..., None]
    top = _above_bins(values, top_k)
    left = values.float().masked_fill(top, float("-inf"))
    edge = left.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float16).min)
    weights = (factor[..., None] * (left - edge)).exp2().masked_fill(left.isneginf(), 0)
    units = (weights.nan_to_num(0) * 2.0**WEIGHT_BITS).long()  # NaN if the query is not finite
    total = units.sum(-1, keepdim=True).float() * 2.0**-WEIGHT_BITS
    rest = wanted[..., None] - top.sum(-1, keepdim=True)
    scale = torch.where(total > 0, CAUTION * (rest << bits) / total, 0)
    chance = (weights * scale).nan_to_num(0).long()  # rounded down
    chance = torch.minimum(chance, 1 << bits).masked_fill(top, 0)
    chance += top * (1 << bits)
    after = (uniform[..., None] >> (32 - bits)) + chance.cumsum(-1)
    return after >> bits != after - chance >> bits, chance / (1 << bits)


def _above_bins(values: Tensor, most: Tensor) -> Tensor:
    """Marks at most ``most`` of the largest values of float16 [..., n]. Values whose first 11 bits are equal form a
    bin. A bin is marked as a whole or not at all."""
    bits = (values + 0).view(torch.int16).int() & 0xFFFF
    bins = (bits ^ ((bits >> 15) * 0x7FFF | 0x8000)) >> 5  # ordered like the values
    last = values.shape[-1] - 1
    too_many = bins.sort(dim=-1, descending=True).values.gather(-1, most.clamp(0, last)[..., None])
    return ((most > last)[..., None] | (bins > too_many)) & ~values.isneginf()


def row_seeds(seeds: np.ndarray, positions: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Returns 32-bit seeds for the sampling of R rows, int64 [R]. Seeds differ between requests, steps and segments.

    Args:
        seeds: uint64 [R], seeds of the requests. With different seeds, sampling leaves out different tokens of the same
            prompt.
        positions: int64 [R] below 2**32, positions of the new tokens.
        first: int64 [R] below 2**32, positions of the segments' first tokens.
    """
    place = positions.astype(np.uint64) << np.uint64(32) | first.astype(np.uint64)
    return (mix64(mix64(seeds) ^ place) >> np.uint64(32)).astype(np.int64)


def mix64(x: np.ndarray) -> np.ndarray:
    """Hashes numbers one to one, uint64 [...] -> uint64 [...] (the finaliser of SplitMix64)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def mix(x: Tensor) -> Tensor:
    """Hashes the low 32 bits of numbers, int64 [...] -> int64 [...] in [0, 2**32) (Chris Wellons' lowbias32)."""
    x = x & WORD
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16
