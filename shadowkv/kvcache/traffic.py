"""What a decode step has to read, and the shortest time that takes: a lower bound from bytes, without any compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shadowkv.kvcache.policy.spec import PAGE

if TYPE_CHECKING:  # a command's help shows these numbers, without PyTorch
    from shadowkv.kvcache.sequences.group_layout import GroupLayout
    from shadowkv.kvcache.sequences.layout import Layout

DEVICE_BANDWIDTH = 4.5e12
"""Highest rate, in bytes per second, at which kernels read a GPU's own memory: measured on one H200."""

HOST_BANDWIDTH = 50.7e9
"""The same for pinned host memory, read by the GPU across the bus without copies: measured on one H200."""

HIT_RATE = 0.6
"""Share of the chunks selected by a step that the previous step selected, too, so that a device buffer has their values
(ShadowKV, arXiv:2410.21465, section 4.1)."""


@dataclass(frozen=True)
class StepReads:
    """Bytes that one sequence reads in one layer of a decode step.

    Attributes:
        exact: exact keys and values: sink, outliers and tail, or everything where the sequence is dense.
        index: what all chunks are scored from, and the bits that exclude some.
        state: the sequence's own, such as its basis.
        keys: what the selected keys are rebuilt from.
        values: selected values that are on the device.
        host_values: selected values that come from the host.
    """

    exact: float = 0.0
    index: float = 0.0
    state: float = 0.0
    keys: float = 0.0
    values: float = 0.0
    host_values: float = 0.0

    @property
    def device(self) -> float:
        """Bytes read from device memory."""
        return self.exact + self.index + self.state + self.keys + self.values

    def seconds(self, device_bandwidth: float, host_bandwidth: float) -> float:
        """The slower of the two tiers, read at the same time; bandwidths in bytes/s."""
        return max(self.device / device_bandwidth, self.host_values / host_bandwidth)


def step_reads(layout: GroupLayout, context: int, hit_rate: float) -> StepReads:
    """Reads of a step of a sequence with ``context`` tokens, the newest included, in a layer of the group.

    ``hit_rate`` is the share of selected chunks whose values a step finds in a device buffer; it matters only where
    values live on the host.
    """
    spec, parts, exact_token = layout.spec, layout.parts, layout.exact_bytes / PAGE
    if layout.window is not None:
        return StepReads(exact=min(context, layout.window) * exact_token)
    if not spec.compresses or context <= spec.dense_limit:
        return StepReads(exact=context * exact_token)
    pages = spec.compressed_pages(context)
    compressed, tail = PAGE * pages, context - PAGE * pages
    budget = int(spec.budget_chunks(np.asarray(context)))
    selected = min(budget * spec.chunk, compressed - spec.static_tokens)
    excluded = sum(field.nbytes for field in layout.excluded_fields)
    values = selected * parts.values.bytes_per_token()
    hit_share = hit_rate if layout.buffer_fields else 0.0
    missed = selected * sum(field.nbytes for field in layout.host_fields) / PAGE * (1 - hit_share)
    return StepReads(
        exact=(spec.static_tokens + tail) * exact_token,
        index=parts.index.scored_bytes(compressed, budget) + pages * excluded,
        state=sum(part.state_bytes_read() for part in parts),
        keys=parts.keys.rebuilt_bytes(selected, compressed),
        values=values - missed,
        host_values=missed,
    )


def attention_seconds(
    layout: Layout, context: int, hit_rate: float, device_bandwidth: float, host_bandwidth: float
) -> float:
    """The shortest time of the reads of a sequence's step in all layers, which follow one another; as ``step_reads``
    and ``StepReads.seconds``."""
    return sum(
        group.shape.num_layers * step_reads(group, context, hit_rate).seconds(device_bandwidth, host_bandwidth)
        for group in layout.groups
    )
