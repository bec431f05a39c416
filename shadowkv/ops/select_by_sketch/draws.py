"""The best of many, and systematic draws by weight from the others.

A number's chance is its share of all weights, times how many are drawn. A sum over what is drawn, each divided by its
chance, estimates the sum over all without bias (Madow, 1949), and the better, the more the weights are like the
summands. Chances are whole numbers of small units, so that what is drawn does not depend on the order of additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MOST_BITS = 20
"""A chance is a multiple of 2**-20, or of more where so many are drawn that their sum would take over 31 bits."""
CAUTION = 0.97
"""What chances add up to, in all that may be drawn: a kernel knows the sum of all weights but roughly beforehand."""


@dataclass(frozen=True)
class Draws:
    """What is drawn besides the chunks that are found.

    Attributes:
        counts: int64 [B], chunks of each row and kv head.
        seeds: int64 [B]; rows of the same seed draw by the same random numbers, in every process and batch.
    """

    counts: Tensor
    seeds: Tensor

    def uniform(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        """Random numbers of 32 bits of a layer's two draws of every row and head, int64 [B, H] each."""
        head = torch.arange(heads, device=self.seeds.device)
        state = mix(self.seeds[:, None] * 0x9E3779B1 + (layer * heads + head))
        return mix(state), mix(state + 0x85EBCA77)


def draw(weights: Tensor, counts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers that are drawn and the chances that they had.

    Args:
        weights: float32 [..., n], none negative.
        counts: int64 [...], how many to draw: at the most, as a chance is 1 at the most.
        uniform: int64 [...], of 32 bits.

    Returns:
        bool [..., n] and float32 [..., n].
    """
    bits = (31 - torch.frexp(counts.clamp(min=1).double()).exponent).clamp(max=MOST_BITS).long()[..., None]
    total = weights.sum(-1, keepdim=True)
    scale = torch.where(total > 0, CAUTION * (counts[..., None] << bits) / total, 0)
    chance = torch.minimum((weights * scale).round().long(), 1 << bits)
    after = (uniform[..., None] >> (32 - bits)) + chance.cumsum(-1)
    return after >> bits != after - chance >> bits, chance / (1 << bits)


def best(values: Tensor, counts: Tensor, in_bins: Tensor) -> Tensor:
    """The largest of ``values`` float16 [..., n] but -inf, as many as ``counts`` int64 [...] says: bool [..., n].

    Where ``in_bins`` [...] at the most so many: values whose first 11 bits are the same are taken together or not at
    all.
    """
    bits = (values + 0).view(torch.int16).int() & 0xFFFF
    bins = (bits ^ ((bits >> 15) * 0x7FFF | 0x8000)) >> 5  # in the values' order
    order = values.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(values.shape[-1], device=values.device).expand_as(order)
    )
    first_left = bins.gather(-1, order).gather(-1, counts.clamp(max=values.shape[-1] - 1)[..., None])
    fits = (counts >= values.shape[-1])[..., None] | (bins > first_left)
    return torch.where(in_bins[..., None], fits, rank < counts[..., None]) & ~values.isneginf()


def mix(x: Tensor) -> Tensor:
    """A hash of the low 32 bits of each number (Chris Wellons' lowbias32), int64 in [0, 2**32)."""
    x = x & WORD
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16
