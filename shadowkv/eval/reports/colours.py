"""The colour and marker of every policy, the same in all plots."""

from __future__ import annotations

import re
from collections.abc import Iterable

PRESETS = {
    "full": "#7f7f7f",
    "full-speculative": "#2f4f4f",
    "shadowkv": "#1f77b4",
    "quest": "#2ca02c",
    "turbo-host": "#ff7f0e",
    "turbo": "#d62728",
    "streaming-llm": "#8c564b",
    "loki": "#e377c2",
    "snapkv": "#bcbd22",
    "infinigen": "#17becf",
    "triattention": "#4b0082",
    "exact-top-k": "#000000",
    "fp8": "#006400",
    "turboquant-4": "#008080",
    "turboquant-3": "#66cdaa",
    "tq3_0": "#daa520",
    "polar-int4": "#6495ed",
    "kvarn": "#ff1493",
    "shard": "#000080",
}
"""Colours of presets, in the order in which they are shown."""

OTHERS = "#9467bd"
"""Colour of policies from outside the package, and of other engines."""

MARKERS = "os^DvP*X<>"
STEP, LIGHTEST = 0.25, 0.6
"""Share of white that each further variation of a preset adds to the preset's colour, and the largest share in all."""


def colour(policy: str) -> str:
    """Returns the colour of a policy's preset, as ``#rrggbb``. Changed fields and the budget do not change the
    colour."""
    return PRESETS.get(re.split(r"[:@ ]", policy)[0], OTHERS)


def styles(policies: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns ``color`` and ``marker`` of each policy in a plot. Variations of a preset have different markers, and
    each has a lighter shade of the preset's colour than the one before."""
    families: dict[str, list[str]] = {}
    for policy in policies:
        families.setdefault(colour(policy), []).append(policy)
    return {
        policy: {
            "color": _lighter(base, number * min(STEP, LIGHTEST / max(1, len(family) - 1))),
            "marker": MARKERS[number % len(MARKERS)],
        }
        for base, family in families.items()
        for number, policy in enumerate(family)
    }


def _lighter(base: str, white: float) -> str:
    parts = [int(base[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
