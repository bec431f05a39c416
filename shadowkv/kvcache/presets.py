"""The named cache policies, one line each; a method is a combination of parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowkv.kvcache.spec import KVSpec

PRESETS: dict[str, KVSpec] = {
    # Every key and value exact on the device: the baseline.
    "full": KVSpec(),
    # The paper: arXiv:2410.21465, section 5.1.
    "shadowkv": KVSpec(keys="low-rank", index="chunk-mean", place="host", chunk=8, outliers=48),
    # Ours: every key found by its own sketch, values in 4 bits; single tokens are selected where no bus is crossed.
    "turbo": KVSpec(keys="low-rank-int8", index="sketch", values="rotated-4bit", chunk=1),
    "turbo-host": KVSpec(keys="low-rank-int8", index="sketch", values="rotated-4bit", place="host", chunk=8),
    # Quest: arXiv:2406.10774; its pages of 16 tokens are our chunks.
    "quest": KVSpec(index="min-max", chunk=16),
}


def preset(kv: str | KVSpec, **overrides: Any) -> KVSpec:
    """The preset of that name, or the given policy, with the fields in ``overrides`` that are not None replaced.

    Raises ValueError for an unknown name.
    """
    if isinstance(kv, str):
        if kv not in PRESETS:
            raise ValueError(f"unknown KV preset {kv!r}; known: {', '.join(PRESETS)}")
        kv = PRESETS[kv]
    return replace(kv, **{key: value for key, value in overrides.items() if value is not None})
