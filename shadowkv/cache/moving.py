"""Snapshots between the device and slabs of host memory, layer by layer, beside what the device computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shadowkv.cache.host import HostTier
from shadowkv.kvcache.reading import Reading
from shadowkv.kvcache.restoring import Restoring


class Mover:
    """Copies on a stream of its own; on a CPU they are done at once."""

    def __init__(self, host: HostTier, device: torch.device) -> None:
        self.host, self.device = host, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def down(self, reading: Reading, slabs: list[int]) -> Iterator[int]:
        """Copies what is read into slabs; yields after each layer that has been launched how many bytes that were, and
        then 0 until all have arrived. Must not be given up half way other than by ``finish``."""
        header = reading.header
        size = header.layer_bytes
        self._follow()
        staging = self._staging(size)
        for layer in range(header.num_layers):
            with self._on_stream():
                reading.read_layer(layer, staging)
                for slab, part in self.host.pieces(slabs, layer * size, (layer + 1) * size):
                    slab.copy_(staging[part], non_blocking=True)
            yield size
        arrived = self._mark()
        while arrived is not None and not arrived.query():
            yield 0

    def up(self, restoring: Restoring, chain: list[tuple[int, int, list[int]]]) -> StreamArrival | None:
        """Copies the links of a chain from slabs to a restored sequence, of which prefill may read a layer as soon as
        it has arrived.

        Args:
            chain: of each link the number of layers, the bytes of one, and slabs.
        """
        self._follow()
        events = []
        staging = self._staging(max(size for _, size, _ in chain))
        for layer in range(chain[0][0]):
            with self._on_stream():
                for link, (_, size, slabs) in enumerate(chain):
                    for slab, part in self.host.pieces(slabs, layer * size, (layer + 1) * size):
                        staging[part].copy_(slab, non_blocking=True)
                    restoring.write_layer(link, layer, staging[:size])
            events.append(self._mark())
        marks = [event for event in events if event is not None]
        return StreamArrival(marks) if marks else None

    def finish(self) -> None:
        """Waits for all that was launched."""
        if self._stream is not None:
            self._stream.synchronize()

    def _staging(self, size: int) -> Tensor:
        with self._on_stream():
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _follow(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class StreamArrival:
    """Layers that another stream writes; see ``kvcache.arrival.Arrival``."""

    def __init__(self, events: list[torch.cuda.Event]) -> None:
        self._events = events

    @property
    def done(self) -> bool:
        """Whether all is there."""
        return self._events[-1].query()

    def wait(self, layer: int) -> None:
        torch.cuda.current_stream().wait_event(self._events[layer])

    def end(self) -> None:
        self.wait(-1)
