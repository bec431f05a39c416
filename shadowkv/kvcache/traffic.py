"""Computes the bytes that a decode step reads, and the time of the reads. The step takes at least this time, because
computation is not counted. The planner and ``engine/startup/crossover.py`` use this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shadowkv.kvcache.policy.spec import PAGE

if TYPE_CHECKING:  # a command's help shows these numbers, without PyTorch
    from shadowkv.kvcache.sequences.group_layout import GroupLayout
    from shadowkv.kvcache.sequences.layout import Layout

DEVICE_BANDWIDTH = 4.5e12
"""Highest bandwidth, in bytes per second, at which kernels read a GPU's own memory: measured on one H200."""

HOST_BANDWIDTH = 50.7e9
"""Highest bandwidth, in bytes per second, at which a GPU reads pinned host memory across the bus without copies:
measured on one H200."""

HIT_RATE = 0.6
"""Share of a step's selected chunks whose values are in the fetch buffer already, because the previous step selected
them too (ShadowKV, arXiv:2410.21465, section 4.1)."""


@dataclass(frozen=True)
class StepReads:
    """Bytes that a decode step reads for one sequence in one layer.

    Attributes:
        exact: exact keys and values: sink, outliers and tail, or all tokens of a dense sequence.
        index: data from which the index computes scores, and the marks of chunks that must not be selected.
        state: the sequence's fitted states, such as the basis of low-rank keys.
        keys: data from which the selected keys are rebuilt.
        values: selected values on the device.
        host_values: selected values that are fetched from the host.
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
        """Time of the reads, in seconds. Device and host memory are read at the same time, so the slower one decides.
        Bandwidths are in bytes per second."""
        return max(self.device / device_bandwidth, self.host_values / host_bandwidth)


def step_reads(layout: GroupLayout, context: int, hit_rate: float) -> StepReads:
    """Bytes that a step reads in one layer of the group, for a sequence of ``context`` tokens, including the newest.

    ``hit_rate`` is the share of selected chunks whose values the fetch buffer has. It matters only for values on the
    host.
    """
    spec, parts, exact_token = layout.spec, layout.parts, layout.exact_bytes / PAGE
    if layout.window is not None:
        return StepReads(exact=min(context, layout.window) * exact_token)
    if not spec.compresses or context <= spec.dense_limit:
        return StepReads(exact=context * exact_token)
    pages = spec.compressed_pages(context)
    compressed, tail = PAGE * pages, context - PAGE * pages
    budget = int(spec.budget_chunks(np.asarray(context)))
    selected = compressed - spec.static_tokens
    if spec.selects:
        selected = min(budget * spec.chunk, selected)
    excluded = sum(field.nbytes for field in layout.excluded_fields)
    values = selected * parts.values.bytes_per_token()
    hit_share = hit_rate if layout.buffer_fields else 0.0
    missed = selected * sum(field.nbytes for field in layout.host_fields) / PAGE * (1 - hit_share)
    return StepReads(
        exact=(spec.static_tokens + tail) * exact_token,
        index=parts.index.scored_bytes(compressed, budget) + pages * excluded if spec.selects else 0.0,
        state=sum(part.state_bytes_read() for part in parts if spec.selects or part is not parts.index),
        keys=parts.keys.rebuilt_bytes(selected, compressed),
        values=values - missed,
        host_values=missed,
    )


def attention_seconds(
    layout: Layout, context: int, hit_rate: float, device_bandwidth: float, host_bandwidth: float
) -> float:
    """Seconds that a step takes to read one sequence's keys and values in all layers, and to read and write the
    sequence's recurrent states. Arguments are as in ``step_reads`` and ``StepReads.seconds``."""
    recurrent = 0.0 if layout.recurrent is None else 2 * layout.recurrent.state_bytes / device_bandwidth
    return recurrent + sum(
        group.attending * step_reads(group, context, hit_rate).seconds(device_bandwidth, host_bandwidth)
        for group in layout.groups
    )
