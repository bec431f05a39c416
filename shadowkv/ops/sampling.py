"""Top-k selection plus systematic sampling of the rest, by weight (Madow, 1949).

The best have a chance of 1, the others one in proportion to their weight. A sum over what is selected, each divided by
its chance, estimates the sum over all without bias, and the better, the more the weights are like the summands. Chances
are whole numbers of small units, so that what is selected does not depend on the order of additions. The one sum that
scales them is exact, or in an order that each backend fixes and that no batch changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shadowkv.ops.mix64 import mix64

WORD = 0xFFFFFFFF
MOST_BITS = 20
"""A chance is a multiple of 2**-20, or of more where so many are sampled that their sum would take over 31 bits."""
CAUTION = 0.97
"""What chances add up to, in all that may be sampled: a kernel knows the sum of all weights but roughly beforehand."""
WEIGHT_BITS = 40
"""Weights, 1 at the most, are added up in units of 2**-40: whole numbers have the same sum in any order, and so however
wide the batch makes a row. Those of 2**23 values, less one, fit in 63 bits."""


@dataclass(frozen=True)
class Sampling:
    """What is sampled besides the top-k chunks.

    Attributes:
        counts: int64 [B], chunks of each row and kv head.
        seeds: int64 [B], of which the low 32 bits count; rows of the same seed sample by the same random numbers, in
            every process and batch.
    """

    counts: Tensor
    seeds: Tensor

    def uniform(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        """Random numbers of 32 bits of a layer's two samplings of every row and head, int64 [B, H] each."""
        head = torch.arange(heads, device=self.seeds.device)
        state = mix(self.seeds[:, None] * 0x9E3779B1 + (layer * heads + head))
        return mix(state), mix(state + 0x85EBCA77)


def systematic_sample(
    values: Tensor, top_k: Tensor, wanted: Tensor, factor: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Selects the largest, and samples others by weights 2**(factor value), -inf never.

    Args:
        values: float16 [..., n].
        top_k: int64 [...], how many of the largest are selected, at the most: of values whose first 11 bits are the
            same all are or none is.
        wanted: int64 [...], how many to select in all, at the most: a chance is 1 at the most.
        factor: float32 [...], not negative.
        uniform: int64 [...], of 32 bits.

    Returns:
        bool [..., n], and float32 [..., n] the chances.
    """
    bits = (31 - torch.frexp(wanted.clamp(min=1).double()).exponent).clamp(max=MOST_BITS).long()[..., None]
    top = _above_bins(values, top_k)
    left = values.float().masked_fill(top, float("-inf"))
    edge = left.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float16).min)
    weights = (factor[..., None] * (left - edge)).exp2().masked_fill(left.isneginf(), 0)
    units = (weights.nan_to_num(0) * 2.0**WEIGHT_BITS).long()  # NaN of a query that is not finite
    total = units.sum(-1, keepdim=True).float() * 2.0**-WEIGHT_BITS
    rest = wanted[..., None] - top.sum(-1, keepdim=True)
    scale = torch.where(total > 0, CAUTION * (rest << bits) / total, 0)
    chance = (weights * scale).nan_to_num(0).round().long()
    chance = torch.minimum(chance, 1 << bits).masked_fill(top, 0)
    chance += top * (1 << bits)
    after = (uniform[..., None] >> (32 - bits)) + chance.cumsum(-1)
    return after >> bits != after - chance >> bits, chance / (1 << bits)


def _above_bins(values: Tensor, most: Tensor) -> Tensor:
    """Those of float16 [..., n] in whole bins, from the largest on, that are at most ``most`` together."""
    bits = (values + 0).view(torch.int16).int() & 0xFFFF
    bins = (bits ^ ((bits >> 15) * 0x7FFF | 0x8000)) >> 5  # in the values' order
    last = values.shape[-1] - 1
    too_many = bins.sort(dim=-1, descending=True).values.gather(-1, most.clamp(0, last)[..., None])
    return ((most > last)[..., None] | (bins > too_many)) & ~values.isneginf()


def row_seeds(seeds: np.ndarray, positions: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Seeds of R rows that sample, int64 [R] of 32 bits: hashes of what tells one sample from another.

    Args:
        seeds: uint64 [R], of the requests: answers of one prompt miss other tokens.
        positions: int64 [R] below 2**32, of the new tokens: every step has another sample.
        first: int64 [R] below 2**32, of the first tokens of what is sampled from: so has every segment.
    """
    place = positions.astype(np.uint64) << np.uint64(32) | first.astype(np.uint64)
    return (mix64(mix64(seeds) ^ place) >> np.uint64(32)).astype(np.int64)


def mix(x: Tensor) -> Tensor:
    """Hashes of the low 32 bits of numbers, int64 [...] -> int64 [...] in [0, 2**32) (Chris Wellons' lowbias32)."""
    x = x & WORD
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16
