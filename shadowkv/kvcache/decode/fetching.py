"""``Fetching``: fetches selected values from the host into a buffer on the device, on a separate stream. ``Decode``
uses it.

Earlier steps have fetched most chunks that a step selects (ShadowKV, arXiv:2410.21465, section 4.1). Only the other
chunks cross the bus, while the device computes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.memory.streams import SideStream
from shadowkv.kvcache.sequences.store import GroupStore
from shadowkv.ops.attend_selected.sources import BufferedRows, CodedRows, DenseRows
from shadowkv.ops.fetch_chunks.reference import SHORT_ROW, ChunkBuffer

MANY_BYTES = 50 * 10**6
"""From this many selected bytes on, four portions of a batch are faster than two: 0.77 ms per layer instead of 0.84 ms
for 48 x 128 chunks of 2 KiB on an H200. For a third of these bytes, three portions are slower than two: 0.37 ms instead
of 0.33 ms."""

TWO_BATCH_CHUNKS = 2**16
"""From this many selected short chunks on, over all rows and heads, a step has two micro-batches. With 130 rows, 120
chunks per head and 8 heads, at 384 B a chunk and with 72 % of the chunks in the buffer, a step of 32 layers takes 38.2
instead of 44.2 ms on an H200, although weights are read twice. With 65 rows and 244 chunks per head, it takes 37.4
instead of 43.0 ms. Fewer or longer chunks have not been measured."""


@dataclass(frozen=True)
class FetchCounts:
    """Counts of selected chunks.

    Attributes:
        selected: chunks that steps selected.
        fetched: selected chunks that were not in the buffer.
        fetched_bytes: bytes of the fetched chunks.
    """

    selected: int = 0
    fetched: int = 0
    fetched_bytes: int = 0


@dataclass(frozen=True)
class Fetch:
    """A fetch in progress. Keep it until all work that reads its values has been launched."""

    values: BufferedRows
    done: torch.cuda.Event | None

    def wait(self) -> BufferedRows:
        """Returns the values. Work that is launched after this call can read them."""
        if self.done is not None:
            self.done.wait()
        return self.values


class Fetching:
    """Fetches into the fetch buffers of a store. The store must have fetch buffers."""

    def __init__(self, store: GroupStore, side_stream: SideStream) -> None:
        of_all_layers = store.buffer
        assert of_all_layers is not None, "the layout has no buffer"
        per_layer = [field.name for field in fields(ChunkBuffer) if field.name != "counters"]
        (field,) = store.layout.host_fields
        self.store, self._counters, self._host = store, of_all_layers.counters, store.page[field.name]
        self._buffers = [
            ChunkBuffer(
                counters=of_all_layers.counters, **{name: getattr(of_all_layers, name)[layer] for name in per_layer}
            )
            for layer in range(len(of_all_layers.rows))
        ]
        self._stream = side_stream.stream
        self._published = torch.zeros(2, dtype=torch.int64, pin_memory=self._stream is not None)

    def micro_batches(self, budget: np.ndarray) -> int:
        """Number of micro-batches, 1 or 2, for a batch whose rows select up to ``budget`` int64 [B] chunks per head."""
        rows = self._buffers[0].rows
        short = rows[0, 0, 0].nbytes < SHORT_ROW
        much = len(budget) > 1 and int(budget.sum()) * rows.shape[1] >= TWO_BATCH_CHUNKS
        return 2 if self._stream is not None and short and much else 1

    def portions(self, batch: CompressedBatch) -> list[slice]:
        """Portions of rows that are fetched one after the other. There is only one portion without a GPU, or if another
        micro-batch computes during the fetch."""
        count, rows = len(batch.slots), self._buffers[0].rows[0]
        many = count * batch.max_budget * rows[:, 0].nbytes >= MANY_BYTES
        parts = 1 if self._stream is None or batch.overlapped else min(count, 4 if many else 2)
        return [slice(part * count // parts, (part + 1) * count // parts) for part in range(parts)]

    def start(self, layer: int, selected: Tensor, batch: CompressedBatch, source: DenseRows | CodedRows) -> Fetch:
        """Starts to fetch the selected chunks int64 [B, H, k] of ``source`` that are not in the buffer."""
        buffer = self._buffers[layer]
        where = self._host[layer], batch.value_pages, batch.slots
        entries = self.store.ops.fetch_chunks(*where, selected, buffer, self._stream, batch.overlapped)
        done = None if self._stream is None else self._stream.record_event()
        return Fetch(BufferedRows(source, buffer.rows, batch.slots, entries), done)

    def publish(self) -> None:
        """Starts to copy the counters to the host, without waiting."""
        self._published.copy_(self._counters, non_blocking=True)

    def forget(self) -> None:
        """Resets the counters."""
        self._counters.zero_()
        self.publish()

    @property
    def counts(self) -> FetchCounts:
        """The counters of the last ``publish``. Any thread can read them."""
        selected, fetched = self._published.tolist()
        return FetchCounts(selected, fetched, fetched * self._buffers[0].rows[0, 0, 0].nbytes)
