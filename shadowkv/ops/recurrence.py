"""``Spans``: the tokens of an op that carries a state from token to token. The cache's recurrent parts make them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """Neighbouring tokens of S sequences, packed one span after the other, and where their states are.

    There is at least one span, and each has at least one token.

    Attributes:
        lengths: tokens of each span; None if every span is one token.
        read: int64 [S], rows of the states before the spans.
        write: int64 [S], rows for the states after the spans. A span can write the row that it reads, but none that
            another span reads.
    """

    lengths: tuple[int, ...] | None
    read: Tensor
    write: Tensor
