"""Bits for groups of principal components, within a total budget: strong ones get more (Shard).

The error of a group in b bits counts as its variance / (3 4^b), and without any bits as 4 times its variance: dropping
a group should cost more than its share of the energy. An exact dynamic program over the groups, for many matrices at a
time; the host never waits for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WIDTHS = (8, 6, 4, 2, 0)
"""Bits that a component may have."""

GROUP = 16
"""Components of a group, in order of their variance; the last group has what is left. Shard has groups of 64;
finer ones follow the variances closer, and take no more bytes."""

DROP_PENALTY = 4.0
"""Cost of a group without bits, in units of its variance."""


def allocate(variance: Tensor, budget: int, group: int = GROUP, drop_penalty: float = DROP_PENALTY) -> Tensor:
    """Widths uint8 [M, r] of components with variances [M, r], strongest first, which sum to at most ``budget`` bits
    and cost least.

    Args:
        group: components that have one width.
        drop_penalty: cost of a group without bits, in units of its variance.
    """
    groups = variance.float().split(group, dim=1)
    sizes = [part.shape[1] for part in groups]
    unit = 2 * math.gcd(*sizes)  # in bits: every sum of widths is a multiple of it
    units = budget // unit
    least = variance.new_zeros(len(variance), units + 1, dtype=torch.float32)  # cost so far within 0, 1, ... units
    choices = []
    for part, size in zip(groups, sizes, strict=True):
        total, taken = part.sum(1, keepdim=True), []
        for width in WIDTHS:
            spent = min(width * size // unit, units + 1)
            error = total / (3 * 4**width) if width else drop_penalty * total
            unable = least.new_full((len(least), spent), math.inf)
            taken.append(torch.cat((unable, least[:, : units + 1 - spent] + error), dim=1))
        least, choice = torch.stack(taken).min(0)
        choices.append(choice)
    widths = torch.tensor(WIDTHS, device=variance.device)
    left = torch.full_like(choices[0][:, :1], units)
    found: list[Tensor] = []
    for choice, size in zip(reversed(choices), reversed(sizes), strict=True):
        found.insert(0, widths[choice.gather(1, left)].expand(-1, size))
        left = left - found[0][:, :1] * size // unit
    return torch.cat(found, dim=1).to(torch.uint8)
