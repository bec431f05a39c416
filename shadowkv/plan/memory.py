"""How much memory sequences take and how many fit, counted from the layout that the engine allocates from."""

from __future__ import annotations

from dataclasses import dataclass

from shadowkv.kvcache.layout import Layout


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one sequence on each tier, whole blocks over all layers, its state included."""

    device: int
    host: int


@dataclass(frozen=True)
class LargestBatch:
    """Sequences that fit: by the device alone, by the host alone (None: it sets no limit), and by both."""

    device: int
    host: int | None
    both: int


def sequence_bytes(layout: Layout, context: int) -> SequenceBytes:
    """What a sequence owns whose prompt and output are ``context`` tokens together."""
    blocks, unit = layout.blocks(layout.pages(context, context)), layout.bytes_per_block()
    return SequenceBytes(blocks.device * unit.device + layout.state_bytes, blocks.host * unit.host)


def largest_batch(need: SequenceBytes, device_bytes: int, host_bytes: int | None) -> LargestBatch:
    """Sequences of ``need`` that fit in what each tier has for the cache; ``host_bytes`` None is any amount."""
    device = max(0, device_bytes) // need.device
    host = host_bytes // need.host if need.host and host_bytes is not None else None
    return LargestBatch(device, host, device if host is None else min(device, host))
