"""The host tier: bytes of snapshots in slabs of host memory, which is pinned if the device is a GPU.

``Mover`` copies between slabs and the device, layer by layer, while the device computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import pin
from shadowkv.kvcache.snapshots.header import SnapshotHeader
from shadowkv.kvcache.snapshots.layers import Reading, Restoring

SLAB_BYTES = 2**22
"""Bytes of a slab. Copying 4 MiB takes 80 us on a bus of 50 GB/s, ten times as long as launching the copy."""

ALIGNMENT = 256
"""Alignment of staging memory, in bytes."""


class HostTier:
    """A pool of slabs.

    Args:
        nbytes: bytes of all slabs, rounded down to whole slabs.
        device: the device that copies to and from the slabs.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(self, nbytes: int, device: torch.device, slab_bytes: int = SLAB_BYTES) -> None:
        self.slab_bytes, self.num_slabs = slab_bytes, nbytes // slab_bytes
        try:
            memory = np.zeros((self.num_slabs, slab_bytes), np.uint8)
        except MemoryError as error:
            raise MemoryError(f"cannot allocate {nbytes / 2**30:.1f} GiB of host memory for snapshots") from error
        if device.type == "cuda" and self.num_slabs:
            weakref.finalize(self, pin(memory))
        self._memory = torch.from_numpy(memory)
        self._free = list(range(self.num_slabs - 1, -1, -1))

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.num_slabs * self.slab_bytes

    @property
    def free_slabs(self) -> int:
        """Number of free slabs."""
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of slabs that are taken."""
        return self.total_bytes - self.free_slabs * self.slab_bytes

    def slabs_of(self, nbytes: int) -> int:
        """Number of slabs for ``nbytes`` bytes."""
        return -(-nbytes // self.slab_bytes)

    def take(self, nbytes: int) -> list[int] | None:
        """Takes slabs for ``nbytes`` bytes. Returns None and takes nothing if there are too few."""
        count = self.slabs_of(nbytes)
        return None if count > len(self._free) else [self._free.pop() for _ in range(count)]

    def give(self, slabs: list[int]) -> None:
        """Returns slabs to the tier."""
        self._free += slabs

    def pieces(self, slabs: list[int], start: int, stop: int) -> Iterator[tuple[Tensor, slice]]:
        """Yields bytes ``start`` to ``stop`` of the slabs' contents: a uint8 tensor for each slab, with its range,
        counted from ``start``."""
        at = start
        while at < stop:
            number, offset = divmod(at, self.slab_bytes)
            count = min(stop - at, self.slab_bytes - offset)
            yield self._memory[slabs[number], offset : offset + count], slice(at - start, at - start + count)
            at += count


class Mover:
    """Copies between slabs and the device, on streams of its own. On a CPU it copies synchronously."""

    def __init__(self, host: HostTier, device: torch.device) -> None:
        self.host, self.device = host, device
        self._stream, self._bus = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    def down(self, reading: Reading, slabs: list[int]) -> Iterator[int]:
        """Copies a reading into slabs. Yields a layer's number of bytes after the copy of this layer is launched. Then
        yields 0 until all layers have arrived. Callers must run it to its end or call ``finish``."""
        header = reading.header
        self._follow()
        with self._on_stream():
            staging = torch.empty(_widest(header), dtype=torch.uint8, device=self.device)
        for layer in range(header.num_layers):
            span = header.span(layer)
            with self._on_stream():
                reading.read_layer(layer, staging)
                for slab, part in self.host.pieces(slabs, span.start, span.stop):
                    slab.copy_(staging[part], non_blocking=True)
            yield span.stop - span.start
        if self._stream is None:
            return
        arrived = self._mark(self._stream)
        while not arrived.query():
            yield 0

    def up(self, restoring: Restoring, chain: list[tuple[SnapshotHeader, list[int]]]) -> StreamArrival | None:
        """Copies a chain from slabs to a restored sequence. A layer crosses the bus while the previous one is put in
        place. Prefill may read each layer as soon as it has arrived. On a CPU it copies at once and returns None.

        Args:
            chain: header and slabs of each snapshot of the chain.
        """
        last = len(chain) - 1
        of_all = ((layer, link) for layer in range(chain[0][0].num_layers) for link in range(len(chain)))
        steps = [(layer, link) for layer, link in of_all if link == last or restoring.has(link, layer)]
        size = max(_widest(header) for header, _ in chain)
        if self._bus is None or self._stream is None:
            staging = torch.empty(size, dtype=torch.uint8, device=self.device)
            for layer, link in steps:
                self._cross(chain[link], layer, staging)
                restoring.write_layer(link, layer, staging[: chain[link][0].bytes_of(layer)])
            return None
        main, arrived = torch.cuda.current_stream(self.device), []
        for stream in (self._bus, self._stream):
            stream.wait_stream(main)
        with torch.cuda.stream(self._bus):
            began = self._mark(self._bus)
            buffers = torch.empty(2, -(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=self.device)
        buffers.record_stream(self._stream)
        free: list[torch.cuda.Event | None] = [None, None]
        for number, (layer, link) in enumerate(steps):
            staging, before = buffers[number % 2], free[number % 2]
            with torch.cuda.stream(self._bus):
                if before is not None:
                    self._bus.wait_event(before)
                self._cross(chain[link], layer, staging)
            self._stream.wait_stream(self._bus)
            with torch.cuda.stream(self._stream):
                restoring.write_layer(link, layer, staging[: chain[link][0].bytes_of(layer)])
            free[number % 2] = self._mark(self._stream)
            if link + 1 == len(chain):
                arrived.append(cast(torch.cuda.Event, free[number % 2]))
        return StreamArrival(self.device, began, arrived)

    def _cross(self, link: tuple[SnapshotHeader, list[int]], layer: int, staging: Tensor) -> None:
        header, slabs = link
        span = header.span(layer)
        for slab, part in self.host.pieces(slabs, span.start, span.stop):
            staging[part].copy_(slab, non_blocking=True)

    def finish(self) -> None:
        """Waits for all launched copies."""
        for stream in (self._stream, self._bus):
            if stream is not None:
                stream.synchronize()

    def _follow(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @staticmethod
    def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _widest(header: SnapshotHeader) -> int:
    """Bytes of the largest layer."""
    return max(header.bytes_of(layer) for layer in range(header.num_layers))


class StreamArrival:
    """Layers that another stream writes (``kvcache.sequences.sequence.PendingLayers``).

    Args:
        device: device of the layers.
        began: event before the first copy.
        arrived: event after each layer's copies.
    """

    def __init__(self, device: torch.device, began: torch.cuda.Event, arrived: list[torch.cuda.Event]) -> None:
        self._device, self._began, self._arrived = device, began, arrived

    @property
    def done(self) -> bool:
        """Whether all layers have arrived."""
        return self._arrived[-1].query()

    @property
    def seconds(self) -> float:
        """Seconds that the copies took, after all layers have arrived."""
        return 1e-3 * self._began.elapsed_time(self._arrived[-1])

    def wait(self, layer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived[layer])

    def end(self) -> None:
        self.wait(-1)
