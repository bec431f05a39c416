"""Memory and bandwidths of known GPUs, by the GPU's name."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from shadowkv.kvcache.traffic import DEVICE_BANDWIDTH, HOST_BANDWIDTH

SHEET_OF_H200 = 4.8
"""Memory bandwidth of an H200 by its data sheet, in TB/s. ``DEVICE_BANDWIDTH`` was measured on an H200."""

HOST_GENERATION = 5
"""PCIe generation on which ``HOST_BANDWIDTH`` was measured. Each generation doubles the bandwidth."""


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        memory_gib: memory in GiB that the driver reports, rounded down.
        sheet_tbs: memory bandwidth by the data sheet, in TB/s (1e12).
        pcie: PCIe generation of its bus, with 16 lanes.
    """

    memory_gib: float
    sheet_tbs: float
    pcie: int

    @property
    def device_bandwidth_tbs(self) -> float:
        """Bandwidth in TB/s at which kernels are estimated to read device memory. It is the data sheet's figure times
        the ratio of measured bandwidth to data sheet bandwidth of an H200."""
        return round(self.sheet_tbs * DEVICE_BANDWIDTH / 1e12 / SHEET_OF_H200, 3)

    @property
    def host_bandwidth_gbs(self) -> float:
        """Bandwidth in GB/s at which the GPU is estimated to read host memory. It is the bandwidth measured on an H200,
        scaled by PCIe generation."""
        return round(HOST_BANDWIDTH / 1e9 * 2.0 ** (self.pcie - HOST_GENERATION), 3)


CARDS = {
    "b200": Card(178, 8.0, 5),
    "h200": Card(139, 4.8, 5),
    "h100": Card(79, 3.35, 5),
    "h20": Card(95, 4.0, 5),
    "a100-80gb": Card(79, 2.039, 4),
    "a100-40gb": Card(39, 1.555, 4),
    "l40s": Card(44, 0.864, 4),
    "l4": Card(21, 0.3, 4),
    "a10g": Card(22, 0.6, 4),
    "rtx-6000-ada": Card(47, 0.96, 4),
    "rtx-5090": Card(31, 1.792, 5),
    "rtx-4090": Card(23, 1.008, 4),
    "rtx-3090": Card(23, 0.936, 4),
}
"""GPUs by name. For models with several variants, the figures are those of the SXM variant."""


def parse_card(text: str) -> str:
    """Returns the name in ``CARDS`` for a common spelling of a GPU's name, such as ``4090``, ``RTX 4090`` or
    ``NVIDIA H100``. ``a100`` means the A100 with 80 GB.

    Raises ArgumentTypeError for an unknown GPU.
    """
    words = [word for word in re.split(r"[\s_-]+", text.lower()) if word not in ("nvidia", "geforce", "tesla")]
    for name in CARDS:
        known = name.split("-")
        ends = [known[first:] for first in range(len(known)) if not known[first].endswith("gb")]
        if "".join(words) in {"".join(part) for part in (*ends, known[:1])} - {"rtx"}:
            return name
    known_cards = ", ".join(CARDS)
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {known_cards}; for another GPU, set --gpu-memory-gib")
