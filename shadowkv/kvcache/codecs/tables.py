"""Tables of optimal scalar quantizers (Max, 1960; Lloyd, 1982) for a unit Gaussian.

The quantizers are symmetric, so tables have only the positive levels, in ascending order. An entry is coded as the
nearest level: boundaries are midpoints, and one of them is 0.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

Half = tuple[float, ...]

GAUSSIAN: dict[int, Half] = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
    5: (
        0.065890, 0.198052, 0.331378, 0.466700, 0.604934, 0.747136, 0.894565, 1.048783, 1.211804, 1.386340, 1.576228,
        1.787233, 2.028728, 2.317739, 2.691120, 3.260732,
    ),
    6: (
        0.033410, 0.100278, 0.167297, 0.234567, 0.302193, 0.370283, 0.438950, 0.508314, 0.578503, 0.649656, 0.721922,
        0.795468, 0.870477, 0.947155, 1.025736, 1.106488, 1.189720, 1.275794, 1.365141, 1.458276, 1.555831, 1.658589,
        1.767542, 1.883977, 2.009611, 2.146810, 2.298981, 2.471305, 2.672274, 2.917407, 3.240437, 3.744101,
    ),
    7: (
        0.016828, 0.050491, 0.084173, 0.117886, 0.151645, 0.185461, 0.219348, 0.253319, 0.287388, 0.321568, 0.355874,
        0.390320, 0.424922, 0.459693, 0.494651, 0.529812, 0.565193, 0.600811, 0.636684, 0.672833, 0.709278, 0.746039,
        0.783140, 0.820603, 0.858454, 0.896720, 0.935428, 0.974610, 1.014297, 1.054523, 1.095327, 1.136747, 1.178829,
        1.221617, 1.265165, 1.309528, 1.354766, 1.400949, 1.448149, 1.496450, 1.545944, 1.596733, 1.648934, 1.702677,
        1.758111, 1.815408, 1.874763, 1.936405, 2.000602, 2.067671, 2.137993, 2.212028, 2.290339, 2.373634, 2.462811,
        2.559041, 2.663887, 2.779514, 2.909047, 3.057246, 3.231933, 3.447430, 3.734937, 4.189694,
    ),
    8: (
        0.008446, 0.025339, 0.042235, 0.059135, 0.076040, 0.092952, 0.109874, 0.126806, 0.143750, 0.160707, 0.177680,
        0.194671, 0.211680, 0.228709, 0.245761, 0.262836, 0.279937, 0.297066, 0.314223, 0.331411, 0.348632, 0.365888,
        0.383180, 0.400510, 0.417881, 0.435293, 0.452750, 0.470253, 0.487804, 0.505405, 0.523058, 0.540766, 0.558531,
        0.576355, 0.594240, 0.612188, 0.630203, 0.648286, 0.666439, 0.684667, 0.702970, 0.721353, 0.739817, 0.758365,
        0.777001, 0.795727, 0.814547, 0.833463, 0.852479, 0.871599, 0.890825, 0.910162, 0.929613, 0.949182, 0.968873,
        0.988689, 1.008636, 1.028718, 1.048939, 1.069304, 1.089818, 1.110486, 1.131313, 1.152305, 1.173468, 1.194808,
        1.216330, 1.238042, 1.259950, 1.282061, 1.304384, 1.326925, 1.349694, 1.372698, 1.395946, 1.419449, 1.443217,
        1.467259, 1.491587, 1.516213, 1.541150, 1.566410, 1.592008, 1.617958, 1.644276, 1.670980, 1.698087, 1.725617,
        1.753589, 1.782027, 1.810953, 1.840393, 1.870375, 1.900928, 1.932084, 1.963878, 1.996348, 2.029536, 2.063485,
        2.098247, 2.133874, 2.170428, 2.207975, 2.246590, 2.286354, 2.327362, 2.369717, 2.413539, 2.458962, 2.506143,
        2.555259, 2.606521, 2.660174, 2.716508, 2.775871, 2.838686, 2.905473, 2.976882, 3.053742, 3.137133, 3.228500,
        3.329848, 3.444072, 3.575588, 3.731666, 3.925638, 4.186595, 4.603536,
    ),
}  # fmt: skip
"""Levels for N(0, 1), by bits."""


@cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """``values`` as a tensor, float32 [n]. It is cached, because only the first call copies from the host, which a
    captured graph cannot do."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def of_bytes(half: Half) -> Half:
    """Rounds levels to odd multiples of 1/255 of the largest level. Kernels look up levels as signed bytes and multiply
    them as integers. A byte b stands for 2 b + 1 steps of 1/255. A level and its negative are then b and ~b."""
    step = half[-1] / 255
    return tuple((2 * round((level / step - 1) / 2) + 1) * step for level in half)


def mirrored(half: Half) -> tuple[float, ...]:
    """Returns all levels in ascending order. ``half`` has the positive ones."""
    return *(-level for level in reversed(half)), *half


@cache
def codebook(half: Half, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns all levels float32 [n], ascending, and the boundaries between them, float32 [n - 1]."""
    levels = mirrored(half)
    return constant(levels, device), constant(tuple((a + b) / 2 for a, b in pairwise(levels)), device)


def nearest(rows: Tensor, boundaries: Tensor) -> Tensor:
    """Indices uint8 of the nearest levels: the number of boundaries at or below each entry. NaN gets the last level."""
    return torch.bucketize(rows, boundaries, out_int32=True, right=True).to(torch.uint8)
