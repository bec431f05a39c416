"""``Batch``: the tokens that go through the layers together, as parts of different kinds. ``KVCache`` makes batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor


class Part(Protocol):
    """New tokens of one kind in a group of layers: of a decode step (``DecodeBatch``), of prompts (``PrefillBlock``),
    or of prompts that stay exact, which a CUDA graph can capture (``ExactPrompts``). Layers with a recurrent state have
    one kind for all (``RecurrentPart``)."""

    @property
    def num_tokens(self) -> int:
        """T."""
        ...


class PartHandler(Protocol):
    """Stores and attends the parts of one kind, in a group of layers. Layers are numbered within the group."""

    def append(self, layer: int, k: Tensor, v: Tensor, part: Any) -> None:
        """Stores keys (before RoPE) and values [T, H, d] of a part's tokens."""

    def start(self, layer: int, q: Tensor, part: Any, sinks: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts attention of a part's queries [T, H_q, d] before RoPE. The returned function finishes it."""
        ...


@dataclass(frozen=True)
class Batch:
    """New tokens that go through the layers together. They are packed, one part after the other.

    Each part attends by itself, to its own sequences. Everything else in a layer sees one batch.

    Attributes:
        groups: the parts, for each group of layers; then, for layers with a recurrent state, ``RecurrentPart``s.
        needed: int64 [n], the tokens that need attention; of the others only keys and values are stored. None if all
            need attention.
    """

    groups: tuple[tuple[Part, ...], ...]
    needed: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(part.num_tokens for part in self.groups[0])

    def with_parts_of(self, other: Batch) -> Batch:
        """A batch of these tokens followed by those of ``other``. All of them need attention."""
        return Batch(tuple(own + others for own, others in zip(self.groups, other.groups, strict=True)))

    def where_needed(self, tokens: Tensor) -> Batch:
        """The batch in which only ``tokens`` int64 [n] need attention."""
        return replace(self, needed=tokens)

    def of_needed(self, x: Tensor) -> Tensor:
        """The rows of ``x`` [T, ...] for the tokens that need attention, [n, ...]."""
        return x if self.needed is None else x[self.needed]
