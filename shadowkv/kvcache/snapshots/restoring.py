"""Restoring: a sequence made from snapshots, which are written layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shadowkv.kvcache.sequences.outline import Link
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import Store
from shadowkv.kvcache.snapshots.layers import SnapshotPlaces


class Restoring:
    """A sequence that has everything but its bytes; to be kept until these are written.

    Until then any user of the sequence has to wait: ``sequence.arrival`` says how, where it is set. Layers may be
    written on any stream that is ordered after the work launched before it was made.

    Attributes:
        sequence: the new sequence.
    """

    def __init__(self, store: Store, chain: Sequence[Link], sequence: CachedSequence) -> None:
        self.sequence = sequence
        self._places = [SnapshotPlaces(store, header, header.cut(stop), sequence).found() for header, stop in chain]

    def write_layer(self, link: int, layer: int, data: Tensor) -> None:
        """Copies the used part of a layer of the chain's snapshot number ``link`` to its place: ``data`` is uint8
        [bytes of the layer] on the cache's device and begins at a multiple of 16 bytes. The host does not wait."""
        for place in self._places[link](layer):
            place.write(layer, data)
