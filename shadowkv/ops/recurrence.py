"""``Spans``: the tokens of an op that carries a state from token to token. The cache's recurrent parts make them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a prompt that are computed together."""


@dataclass(frozen=True)
class Spans:
    """Neighbouring tokens of S sequences, packed one span after the other, and where their states are.

    There is at least one span, and each has at least one token.

    Attributes:
        lengths: tokens of each span, at least one; None if every span is one token.
        read: int64 [S], rows of the states before the spans.
        write: int64 [S], rows for the states after the spans. A span can write the row that it reads, but none that
            another span reads.
    """

    lengths: tuple[int, ...] | None
    read: Tensor
    write: Tensor

    @property
    def chunks(self) -> Tensor:
        """The chunks of all spans that have lengths, for kernels: int64 [n, 2], span and number within it."""
        return self._on_device[0]

    @property
    def starts(self) -> Tensor:
        """Where spans that have lengths begin, for kernels: int64 [S + 1], the first token of each, then their end."""
        return self._on_device[1]

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor]:
        """``chunks`` and ``starts``, copied in one piece from pinned memory: the host does not wait."""
        assert self.lengths is not None
        chunks = [(span, chunk) for span, length in enumerate(self.lengths) for chunk in range(-(-length // CHUNK))]
        numbers = torch.tensor([*(number for pair in chunks for number in pair), *accumulate(self.lengths, initial=0)])
        if self.read.is_cuda:
            numbers = numbers.pin_memory().to(self.read.device, non_blocking=True)
        return numbers[: 2 * len(chunks)].view(-1, 2), numbers[2 * len(chunks) :]
