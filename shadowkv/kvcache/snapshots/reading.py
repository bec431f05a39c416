"""Readings: a sequence's bytes, layer by layer, while it goes on, finishes or is evicted."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.header import SnapshotHeader
from shadowkv.kvcache.snapshots.layers import SnapshotPlaces


class Reading:
    """What a snapshot of a sequence is made from, where it was when the reading began.

    It holds the blocks that it reads until it is closed: the sequence may meanwhile decode, be trimmed, forked and
    released. What is read cannot be truncated. An exact tail is overwritten by what follows it, so that a compressed
    sequence whose tail is read cannot be extended, and one that still decodes should be read up to a fork point.
    Layers may be read on any stream that is ordered after the work launched before the reading was opened.

    Attributes:
        header: the header of the snapshot.
    """

    def __init__(self, pool: SequencePool, sequence: CachedSequence, header: SnapshotHeader) -> None:
        self.header, self._pool, self._sequence = header, pool, sequence
        places = SnapshotPlaces(pool.store, header, header.cut(header.length), sequence)
        self._held = {kind: pool.pools[kind].blocks_of(names) for kind, names in places.held.items()}
        self._places, self._open = places.found(), True
        for kind, blocks in self._held.items():
            pool.pools[kind].retain(blocks)
        sequence.readings.append(header.length)

    def read_layer(self, layer: int, out: Tensor) -> None:
        """Copies a layer into ``out``, uint8 [bytes of the layer] on the cache's device, which begins at a multiple of
        16 bytes; bytes outside fields become 0. The host does not wait."""
        for place in self._places(layer):
            place.read(layer, out)
        fields = self.header.fields_of(layer)
        starts = [*(field.offset for field in fields[1:]), self.header.bytes_of(layer)]
        stops = [field.offset + field.nbytes for field in fields]
        for stop, start in zip(stops, starts, strict=bool(stops)):
            if stop < start:
                out[stop:start].zero_()

    def close(self) -> None:
        """Releases what it reads: subsequent work on the device must be ordered after the layers that were read."""
        if not self._open:
            return
        self._open = False
        for kind, blocks in self._held.items():
            self._pool.pools[kind].release(blocks)
        self._sequence.readings.remove(self.header.length)

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
