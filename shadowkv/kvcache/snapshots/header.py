"""Snapshots: what follows a fork point of a cached sequence, as bytes, and the header that says what they are.

The bytes are stored layer after layer, so that a layer travels in one piece. Snapshots form chains: each begins where
the used part of the one before it ends, and the first at 0. What is sealed on a state that an earlier snapshot has is
stored without that state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.snapshots import dataclass_json
from shadowkv.kvcache.snapshots.check import reasons
from shadowkv.kvcache.snapshots.contents import SnapshotContents, SnapshotSegment
from shadowkv.kvcache.snapshots.fields import LAYER_ALIGNED, SnapshotField, aligned


class Cut(NamedTuple):
    """The part of a snapshot that is used: segments, each with its first pages, and the first tokens of the tail."""

    segments: tuple[SnapshotSegment, ...]
    tail_tokens: int
    observed: bool

    def end(self, start: int) -> int:
        """Position after its last token, where the snapshot begins at ``start``."""
        return (self.segments[-1].sealed(start) if self.segments else start) + self.tail_tokens


@dataclass(frozen=True)
class SnapshotHeader(SnapshotContents):
    """What a snapshot holds. Raises ValueError where its numbers contradict one another."""

    def __post_init__(self) -> None:
        for reason in reasons(self):
            raise ValueError(f"this is no header of a snapshot: {reason}")

    @property
    def nbytes(self) -> int:
        """Bytes over all layers."""
        return self.span(self.num_layers - 1).stop

    @property
    def runs(self) -> tuple[int, int]:
        """Number of runs of equal size, and the bytes of one: its layers, or all of them as one where they differ."""
        return (1, self.nbytes) if self.skip_layers else (self.num_layers, self.layer_bytes)

    def skips(self, layer: int) -> bool:
        """Whether a layer has ``exact_fields``."""
        return not self.skip_layers <= layer < self.num_layers - self.skip_layers

    def fields_of(self, layer: int) -> tuple[SnapshotField, ...]:
        """Fields of any layer."""
        return self.exact_fields if self.skips(layer) else self.fields

    def bytes_of(self, layer: int) -> int:
        """Bytes of any layer, a multiple of 256."""
        if not self.skips(layer):
            return self.layer_bytes
        return aligned(sum(field.nbytes for field in self.exact_fields), LAYER_ALIGNED)

    def span(self, layer: int) -> slice:
        """Where a layer's bytes are."""
        skipped = min(layer, self.skip_layers) + max(0, layer - (self.num_layers - self.skip_layers))
        start = skipped * self.bytes_of(0) + (layer - skipped) * self.layer_bytes
        return slice(start, start + self.bytes_of(layer))

    @property
    def exact(self) -> int:
        """Position of the first token of its tail."""
        return self.length - self.tail_tokens

    def cut(self, stop: int) -> Cut:
        """The part of it that is used by a sequence that continues differently after its first ``stop`` tokens; all of
        it where those are all. Raises ValueError unless they end in it: at a page boundary, or among exact tokens."""
        if not self.start < stop <= self.length or (stop < self.exact and stop % PAGE):
            raise ValueError(f"a snapshot of tokens {self.start} to {self.length} cannot be cut at {stop}")
        if stop == self.length:
            return Cut(self.segments, self.tail_tokens, self.observed)
        if stop > self.exact or not self.segments:
            return Cut(self.segments, stop - self.exact, False)
        there = (one for one in self.segments if one.begin(self.start) < stop)
        return Cut(tuple(one.cut(self.start, stop) for one in there), 0, False)

    def to_json(self) -> str:
        """JSON for ``from_json``."""
        return dataclass_json.to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> SnapshotHeader:
        """A header from untrusted text; raises ValueError that says what is wrong."""
        return dataclass_json.from_json(SnapshotHeader, text)


@dataclass(frozen=True)
class Snapshot:
    """A header and its bytes.

    Attributes:
        data: uint8 [*header.runs], on any device.
    """

    header: SnapshotHeader
    data: Tensor

    def __post_init__(self) -> None:
        wanted = self.header.runs
        if self.data.dtype != torch.uint8 or self.data.shape != wanted:
            raise ValueError(f"a snapshot's bytes are uint8 {wanted}, not {self.data.dtype} {tuple(self.data.shape)}")

    def layer(self, number: int) -> Tensor:
        """A layer's bytes, uint8 [n]."""
        return self.data.flatten()[self.header.span(number)]

    def arrays(self) -> dict[str, Tensor]:
        """All fields by name, [layers, *shape], of the layers that have them."""
        found: dict[str, list[Tensor]] = {}
        for number in range(self.header.num_layers):
            for field in self.header.fields_of(number):
                found.setdefault(field.name, []).append(field.of(self.layer(number)))
        return {name: torch.stack(layers) for name, layers in found.items()}
