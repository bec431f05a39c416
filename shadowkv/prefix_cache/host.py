"""The host tier: bytes of snapshots in slabs of host memory, which is pinned if the device is a GPU.

``Mover`` copies between slabs and the device, layer by layer, while the device computes. With tensor parallelism all
ranks have the same slabs, in shared memory. Rank 0 decides what the slabs hold, and each rank has a mover for its own
part of the copies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import IO, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.arenas import pin
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import Link, SnapshotHeader
from shadowkv.kvcache.snapshots.layers import Reading, Restoring

SLAB_BYTES = 2**22
"""Bytes of a slab. Copying 4 MiB takes 80 us on a bus of 50 GB/s, ten times as long as launching the copy."""

ALIGNMENT = 256
"""Alignment, in bytes, of the device memory that layers pass through before they are written to their blocks."""


def shared_file() -> IO[bytes]:
    """Returns a new, empty file in memory. Processes that inherit its descriptor can share slabs."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("shadowkv-host-tier"), "r+b")
    return tempfile.TemporaryFile()  # macOS has no files in memory


class HostTier:
    """A pool of slabs.

    Args:
        nbytes: bytes of all slabs, rounded down to whole slabs.
        device: the device that copies to and from the slabs.
        shared: descriptor of a file (``shared_file``) that has the slabs, for all processes that map it; None for
            memory of this process alone. Only one of the processes may take and give slabs.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(
        self, nbytes: int, device: torch.device, slab_bytes: int = SLAB_BYTES, shared: int | None = None
    ) -> None:
        self.slab_bytes, self.num_slabs = slab_bytes, nbytes // slab_bytes
        try:
            memory = _allocate(self.total_bytes, shared).reshape(self.num_slabs, slab_bytes)
        except (MemoryError, OSError) as error:
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


def _allocate(nbytes: int, shared: int | None) -> np.ndarray:
    """Returns uint8 [nbytes]: the contents of the file ``shared``, or zeros if ``shared`` is None."""
    if shared is None or not nbytes:
        return np.zeros(nbytes, np.uint8)
    if os.fstat(shared).st_size < nbytes:
        os.ftruncate(shared, nbytes)
    return np.frombuffer(mmap.mmap(shared, nbytes), np.uint8)


class Place(NamedTuple):
    """Where a copy is in host memory: its slabs, and the bytes of each rank's part (``Copy.parts``)."""

    slabs: list[int]
    parts: tuple[int, ...]


class Arrival(Protocol):
    """A restored sequence on its way to the device."""

    @property
    def done(self) -> bool:
        """Whether all its layers have arrived. Then the slabs are not read any more."""

    @property
    def seconds(self) -> float:
        """Seconds that the copies took, after all layers have arrived."""


class Arrived(NamedTuple):
    """The arrival of a sequence that was restored at once, on a CPU."""

    seconds: float
    done: bool = True


class Mover:
    """Copies between slabs and the device, on streams of its own. On a CPU it copies synchronously.

    Args:
        cache: the cache of this rank.
        rank: tensor-parallel rank of this process. The mover copies this rank's part of each copy.
    """

    def __init__(self, cache: KVCache, host: HostTier, rank: int = 0) -> None:
        self.cache, self.host, self.device, self._rank = cache, host, cache.device, rank
        gpu = self.device.type == "cuda"
        self._stream, self._bus = (torch.cuda.Stream(self.device) if gpu else None for _ in range(2))

    def parts(self, header: SnapshotHeader) -> tuple[int, ...]:
        """Returns the bytes of each rank's part of a copy (``Copy.parts``). ``header`` describes rank 0's part."""
        return (header.nbytes,)

    def open(self, sequence: CachedSequence, start: int, stop: int) -> Reading:
        """Starts to read a sequence's tokens ``start`` to ``stop`` as a snapshot: returns an open ``Reading``, which
        gives the bytes layer by layer (``Snapshots.open_reading``)."""
        return self.cache.snapshots.open_reading(sequence, start, stop)

    def close(self, reading: Reading) -> None:
        """Closes a ``Reading``. The copies that ``down`` made of it must have arrived, or ``finish`` must have been
        called."""
        reading.close()

    def down(self, reading: Reading, place: Place) -> Iterator[int]:
        """Copies a ``Reading``'s snapshot into slabs. Yields the number of bytes of each layer that has any, once the
        copy of the layer is launched. Then yields 0 until all layers have arrived. Callers must run it to its end or
        call ``finish``."""
        header, begin = reading.header, self._begin(reading.header, place)
        self._follow()
        with self._on_stream():
            staging = torch.empty(_widest(header), dtype=torch.uint8, device=self.device)
        for layer in range(header.num_layers):
            span = header.span(layer)
            if span.start == span.stop:  # a layer whose recurrent state was not kept
                continue
            with self._on_stream():
                reading.read_layer(layer, staging)
                for slab, part in self.host.pieces(place.slabs, begin + span.start, begin + span.stop):
                    slab.copy_(staging[part], non_blocking=True)
            yield span.stop - span.start
        if self._stream is None:
            return
        arrived = self._mark(self._stream)
        while not arrived.query():
            yield 0

    def restore(
        self,
        links: Sequence[Link],
        places: Sequence[Place],
        start: int,
        capacity: int,
        parent: CachedSequence | None,
    ) -> tuple[Restoring, Arrival]:
        """Starts to restore a chain of copies, which are in ``places``. Other arguments are as for
        ``Snapshots.restore``.

        Raises the errors of ``Snapshots.restore`` and of the copies. After an error no blocks stay taken.
        """
        restoring, began = self.cache.snapshots.restore(links, start, capacity, parent), time.monotonic()
        try:
            arrival = self.up(restoring, [(link.header, place) for link, place in zip(links, places, strict=True)])
        except BaseException:
            self.finish()
            self.cache.pools.release(restoring.sequence)
            raise
        restoring.sequence.pending_layers = arrival
        return restoring, Arrived(time.monotonic() - began) if arrival is None else arrival

    def up(self, restoring: Restoring, chain: list[tuple[SnapshotHeader, Place]]) -> StreamArrival | None:
        """Copies a chain from slabs to a restored sequence. While one layer crosses the bus, the previous one is
        written to its blocks. Prefill may read each layer as soon as it has arrived. On a CPU it copies at once and
        returns None.

        Args:
            chain: header and place of each snapshot of the chain.
        """
        parts = [(header, place.slabs, self._begin(header, place)) for header, place in chain]
        last = len(chain) - 1
        of_all = ((layer, link) for layer in range(chain[0][0].num_layers) for link in range(len(chain)))
        steps = [(layer, link) for layer, link in of_all if link == last or restoring.has(link, layer)]
        size = max(_widest(header) for header, _ in chain)
        if self._bus is None or self._stream is None:
            staging = torch.empty(size, dtype=torch.uint8, device=self.device)
            for layer, link in steps:
                self._cross(parts[link], layer, staging)
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
                self._cross(parts[link], layer, staging)
            self._stream.wait_stream(self._bus)
            with torch.cuda.stream(self._stream):
                restoring.write_layer(link, layer, staging[: chain[link][0].bytes_of(layer)])
            free[number % 2] = self._mark(self._stream)
            if link + 1 == len(chain):
                arrived.append(cast(torch.cuda.Event, free[number % 2]))
        return StreamArrival(self.device, began, arrived)

    def _begin(self, header: SnapshotHeader, place: Place) -> int:
        """Returns the offset of this rank's part in the slabs of a copy. ``header`` describes this rank's part. Raises
        RuntimeError if rank 0 has left room for another number of bytes, since ranks would then read each other's
        parts."""
        if header.nbytes != place.parts[self._rank]:
            raise RuntimeError(
                f"rank {self._rank}'s part of a cached prompt has {header.nbytes} bytes, and rank 0 expects "
                f"{place.parts[self._rank]}"
            )
        return sum(place.parts[: self._rank])

    def _cross(self, part: tuple[SnapshotHeader, list[int], int], layer: int, staging: Tensor) -> None:
        header, slabs, begin = part
        span = header.span(layer)
        for slab, piece in self.host.pieces(slabs, begin + span.start, begin + span.stop):
            staging[piece].copy_(slab, non_blocking=True)

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
