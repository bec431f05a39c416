"""What a snapshot's header says, before any of it is checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shadowkv.kvcache.policy.growth import cut_short
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.snapshots.fields import SnapshotField


@dataclass(frozen=True)
class SnapshotSegment:
    """A segment of a sequence, or its newer part.

    Attributes:
        first, end, reach, fitted, static_tokens: as in ``Segment``.
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
        """Position of its first token in a snapshot from ``start`` on."""
        return start if self.continued else self.first

    def sealed(self, start: int) -> int:
        """Position after its last sealed token."""
        return self.begin(start) + PAGE * self.num_pages

    def cut(self, start: int, stop: int) -> SnapshotSegment:
        """The segment for a sequence that continues differently after position ``stop`` (``Segment.prefix``)."""
        count = min(self.num_pages, (stop - self.begin(start)) // PAGE)
        end, reach, fitted = cut_short(self.end, self.reach, self.fitted, stop)
        return replace(self, end=end, reach=reach, fitted=fitted, num_pages=count)


@dataclass(frozen=True)
class SnapshotContents:
    """What a snapshot says that it holds.

    Attributes:
        form: what caches must have in common to read it (``form_of``).
        start: tokens of the sequence that come before it, a multiple of 64.
        length: tokens of the sequence.
        segments: those with sealed pages after ``start``, or the last one where none has; empty where it is dense.
        tail_tokens: exact tokens after ``start`` and after what is sealed, up to ``length``.
        observed: whether it has what is known of a dense sequence's state.
        fields: those of a layer, one after the other: ``segments.0.pages.latents`` [num_pages, ...],
            ``segments.0.state.basis`` [...], ``segments.0.static`` [2, static_tokens, H, d], ``tail``
            [2, tail_tokens, H, d], ``observed.basis`` [...]: RoPE-rotated keys and values where there are two.
        num_layers: all layers of the model.
        layer_bytes: bytes of a layer that has these fields.
        skip_layers: that many of the first and of the last layers have others:
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
