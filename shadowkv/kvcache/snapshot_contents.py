"""What a snapshot's header says, before anything of it is checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shadowkv.kvcache.growth import cut_short
from shadowkv.kvcache.snapshot_fields import SnapshotField
from shadowkv.kvcache.spec import PAGE


@dataclass(frozen=True)
class SnapshotSegment:
    """A segment of a sequence, or its newer part.

    Attributes:
        first, end, reach, fitted, static_tokens: as a ``Segment`` has them.
        num_pages: sealed pages that are in this snapshot.
        continued: whether it begins in an earlier snapshot of the chain, which has its state, its static tokens and its
            pages before the snapshot's start.
    """

    first: int
    end: int
    reach: int
    fitted: int
    static_tokens: int
    num_pages: int
    continued: bool

    def begin(self, start: int) -> int:
        """Position of the first token that a snapshot from ``start`` on has of it."""
        return start if self.continued else self.first

    def sealed(self, start: int) -> int:
        """Position after its last sealed token."""
        return self.begin(start) + PAGE * self.num_pages

    def cut(self, start: int, stop: int) -> SnapshotSegment:
        """It for a sequence that goes on otherwise behind position ``stop`` (``Segment.prefix``)."""
        count = min(self.num_pages, (stop - self.begin(start)) // PAGE)
        end, reach, fitted = cut_short(self.end, self.reach, self.fitted, stop)
        return replace(self, end=end, reach=reach, fitted=fitted, num_pages=count)


@dataclass(frozen=True)
class SnapshotContents:
    """What a snapshot says that it holds.

    Attributes:
        form: what caches must have in common to read it (``form_of``).
        start: tokens of the sequence that stand before it, a multiple of 64.
        length: tokens of the sequence.
        segments: those with sealed pages behind ``start``, or the last one where none has; empty where it is dense.
        tail_tokens: exact tokens behind ``start`` and behind what is sealed, up to ``length``.
        observed: whether what is known of a dense sequence's state is here.
        fields: of a layer, one behind the other: ``segments.0.pages.latents`` [num_pages, ...],
            ``segments.0.state.basis`` [...], ``segments.0.static`` [2, static_tokens, H, d], ``tail``
            [2, tail_tokens, H, d], ``observed.basis`` [...]: RoPE-rotated keys and values where there are two.
        num_layers: all of the model's.
        layer_bytes: of those that have these fields.
        skip_layers: so many of the first and of the last layers have others:
        exact_fields: ``tokens`` [2, length - start, H, d], RoPE-rotated keys and values.
    """

    form: str
    start: int
    length: int
    segments: tuple[SnapshotSegment, ...]
    tail_tokens: int
    observed: bool
    fields: tuple[SnapshotField, ...]
    num_layers: int
    layer_bytes: int
    skip_layers: int = 0
    exact_fields: tuple[SnapshotField, ...] = ()
