"""What goes through the layers together, as a cache sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor


class Part(Protocol):
    """New tokens of one kind in a group of layers: the next ones of sequences that decode (``DecodeBatch``), those of
    prompts (``PrefillBlock``), or those of prompts that stay exact, in a form that a graph can hold
    (``ExactPrompts``)."""

    @property
    def num_tokens(self) -> int:
        """T."""
        ...


class PartHandler(Protocol):
    """What a group of layers does with the parts of one kind. Layers are counted within the group."""

    def append(self, layer: int, k: Tensor, v: Tensor, part: Any) -> None:
        """Takes keys (before RoPE) and values [T, H, d] of a part's tokens."""

    def start(self, layer: int, q: Tensor, part: Any, sinks: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts attention of a part's queries [T, H_q, d] before RoPE; the returned function finishes it."""
        ...


@dataclass(frozen=True)
class Batch:
    """New tokens that go through the layers together, packed: those of each part in turn.

    The parts are of different sequences and attend apart; everything else in a layer sees one batch.

    Attributes:
        groups: for each group of layers, the parts as it sees them.
        needed: int64 [n], the tokens whose attention is needed: the others only leave their keys and values. None
            where all are.
    """

    groups: tuple[tuple[Part, ...], ...]
    needed: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(part.num_tokens for part in self.groups[0])

    def with_parts_of(self, other: Batch) -> Batch:
        """One batch of these tokens and then the other's, of all of which attention is needed."""
        return Batch(tuple(own + others for own, others in zip(self.groups, other.groups, strict=True)))

    def where_needed(self, tokens: Tensor) -> Batch:
        """The same batch, where attention is needed of ``tokens`` int64 [n]."""
        return replace(self, needed=tokens)

    def of_needed(self, x: Tensor) -> Tensor:
        """[n, ...] of [T, ...], for the tokens whose attention is needed."""
        return x if self.needed is None else x[self.needed]
