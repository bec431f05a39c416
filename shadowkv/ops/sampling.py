"""Top-k selection plus systematic sampling of the rest, by weight (Madow, 1949).

The best have a chance of 1, the others a chance in proportion to their weight. A sum over what is selected, each term
divided by its chance, is an unbiased estimate of the sum over all; the estimate is better the closer the weights are to
the summands. Chances are whole multiples of small units, so that the selection does not depend on the order of
additions. The one sum that scales them is exact, or in an order that each backend fixes and that the batch does not
change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MAX_BITS = 20
"""A chance is a multiple of 2**-20, or of a larger unit if the sum of all chances would take more than 31 bits."""
CAUTION = 0.97
"""What chances sum up to, as a share of all that may be sampled: a kernel knows the sum of all weights only roughly
beforehand."""
WEIGHT_BITS = 40
"""Weights, at most 1, are summed in units of 2**-40: whole numbers have the same sum in any order, and thus for any
row width in a batch. Sums of up to 2**23 - 1 values fit in 63 bits."""


@dataclass(frozen=True)
class Sampling:
    """What is sampled besides the top-k chunks.

    Attributes:
        counts: int64 [B], chunks of each row and kv head.
        seeds: int64 [B], only the low 32 bits are used; rows with the same seed use the same random numbers in every
            process and batch.
    """

    counts: Tensor
    seeds: Tensor

    def uniform(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        """32-bit random numbers for a layer's two samplings of every row and head, int64 [B, H] each."""
        head = torch.arange(heads, device=self.seeds.device)
        state = mix(self.seeds[:, None] * 0x9E3779B1 + (layer * heads + head))
        return mix(state), mix(state + 0x85EBCA77)


def systematic_sample(
    values: Tensor, top_k: Tensor, wanted: Tensor, factor: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Selects the largest values, and samples others by weights 2**(factor value); -inf is never selected.

    Args:
        values: float16 [..., n].
        top_k: int64 [...], at most how many of the largest are selected: of values whose first 11 bits are equal,
            either all or none are selected.
        wanted: int64 [...], at most how many to select in total: a chance is at most 1.
        factor: float32 [...], not negative.
        uniform: int64 [...], 32-bit random numbers.

    Returns:
        bool [..., n], what is selected, and float32 [..., n], the chances.
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
    chance = (weights * scale).nan_to_num(0).round().long()
    chance = torch.minimum(chance, 1 << bits).masked_fill(top, 0)
    chance += top * (1 << bits)
    after = (uniform[..., None] >> (32 - bits)) + chance.cumsum(-1)
    return after >> bits != after - chance >> bits, chance / (1 << bits)


def _above_bins(values: Tensor, most: Tensor) -> Tensor:
    """Those of float16 [..., n] in as many whole bins, from the largest on, as hold at most ``most`` in total."""
    bits = (values + 0).view(torch.int16).int() & 0xFFFF
    bins = (bits ^ ((bits >> 15) * 0x7FFF | 0x8000)) >> 5  # ordered like the values
    last = values.shape[-1] - 1
    too_many = bins.sort(dim=-1, descending=True).values.gather(-1, most.clamp(0, last)[..., None])
    return ((most > last)[..., None] | (bins > too_many)) & ~values.isneginf()


def row_seeds(seeds: np.ndarray, positions: np.ndarray, first: np.ndarray) -> np.ndarray:
    """32-bit seeds of R rows that sample, int64 [R]: hashes of what distinguishes one sample from another.

    Args:
        seeds: uint64 [R], seeds of the requests: answers to the same prompt miss different tokens.
        positions: int64 [R] below 2**32, positions of the new tokens: every step has a different sample.
        first: int64 [R] below 2**32, positions of the first tokens that are sampled from: so has every segment.
    """
    place = positions.astype(np.uint64) << np.uint64(32) | first.astype(np.uint64)
    return (mix64(mix64(seeds) ^ place) >> np.uint64(32)).astype(np.int64)


def mix64(x: np.ndarray) -> np.ndarray:
    """Bijective hashes of numbers, uint64 [...] -> uint64 [...] (the finaliser of SplitMix64)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def mix(x: Tensor) -> Tensor:
    """Hashes of the low 32 bits of numbers, int64 [...] -> int64 [...] in [0, 2**32) (Chris Wellons' lowbias32)."""
    x = x & WORD
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16
