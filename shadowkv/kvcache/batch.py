"""``Batch``: the tokens that go through the layers together, as parts of different kinds. ``KVCache`` makes batches.

Shapes: T tokens, H kv heads, H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from shadowkv.kvcache.policy.shape import IndexQueries


class Part(Protocol):
    """New tokens of one kind in a group of layers: of a decode step (``DecodeBatch``), of prompts (``PrefillBlock``),
    or of prompts that a CUDA graph can capture (``ExactPrompts``). Layers with a recurrent state have one kind for all
    tokens (``RecurrentPart``)."""

    @property
    def num_tokens(self) -> int:
        """T, the number of new tokens."""
        ...


class PartHandler(Protocol):
    """Stores keys and values, and computes attention, for the parts of one kind in a group of layers. Layers are
    numbered within the group."""

    def append(self, layer: int, k: Tensor, v: Tensor, part: Any, index_keys: Tensor | None = None) -> None:
        """Stores keys (before RoPE) and values [T, H, d] of a part's tokens, and index keys (before RoPE) [T, 1, d] in
        layers with an indexer."""

    def start(
        self, layer: int, q: Tensor, part: Any, sinks: Tensor | None = None, index_queries: IndexQueries | None = None
    ) -> Callable[[], Tensor]:
        """Starts attention of a part's queries [T, H_q, d] before RoPE. The returned function finishes the attention
        and returns [T, H_q, d]. In layers with an indexer, ``index_queries`` [T, H, d] before RoPE select what is
        attended to."""
        ...


@dataclass(frozen=True)
class Batch:
    """New tokens that go through the layers together. They are packed, one part after the other.

    Each part computes its own attention, to its own sequences. The rest of a layer is computed for the whole batch at
    once.

    Attributes:
        groups: for each group of layers with attention, its parts. If layers have a recurrent state, their
            ``RecurrentPart``s come last, as one more group.
        needed: int64 [n], the tokens that need attention; for other tokens, only keys and values are stored. None if
            all tokens need attention.
    """

    groups: tuple[tuple[Part, ...], ...]
    needed: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T, the number of new tokens."""
        return sum(part.num_tokens for part in self.groups[0])

    def with_parts_of(self, other: Batch) -> Batch:
        """Returns a batch of this batch's tokens, followed by those of ``other``. All of them need attention."""
        return Batch(tuple(own + others for own, others in zip(self.groups, other.groups, strict=True)))

    def where_needed(self, tokens: Tensor) -> Batch:
        """Returns this batch with attention only for ``tokens`` int64 [n]."""
        return replace(self, needed=tokens)

    def of_needed(self, x: Tensor) -> Tensor:
        """Returns the rows [n, ...] of ``x`` [T, ...] that belong to tokens that need attention."""
        return x if self.needed is None else x[self.needed]
