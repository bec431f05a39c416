"""How much memory sequences take, counted from the layout that the engine allocates from."""

from __future__ import annotations

from dataclasses import dataclass

from shadowkv.kvcache.sequences.layout import Layout


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one sequence on each tier, in whole blocks over all layers, including its state."""

    device: int
    host: int


def sequence_bytes(layout: Layout, context: int) -> SequenceBytes:
    """What a sequence owns whose prompt and output have ``context`` tokens in total."""
    size = layout.tier_bytes(layout.demand(context, context))
    return SequenceBytes(size["device"] + size["segment_slots"] + size["states"], size["host"])
