"""Baselines: methods of other papers and formats of other engines, one file each, with its presets. Baselines are
registered as plugins are, and use only the cache's public interface.

Presets have the default budget, so that methods are compared at equal budgets. The papers' own budgets are in the
docstrings of ``register``.
"""

from __future__ import annotations

from shadowkv.baselines import (
    infinigen,
    kvarn,
    loki,
    polarquant,
    qjl,
    quest,
    shard,
    snapkv,
    streaming_llm,
    tq3_0,
    triattention,
    vq,
)


def register() -> None:
    """Registers the codecs, parts and presets of all baselines."""
    for method in (quest, streaming_llm, loki, snapkv, infinigen, triattention):
        method.register()
    for format in (tq3_0, polarquant, kvarn, qjl, vq, shard):
        format.register()
