"""``Spans``: tells an op with a recurrent state which tokens belong to which sequence. The cache's recurrent parts make
``Spans``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a span that are computed together."""


@dataclass(frozen=True)
class Spans:
    """S spans, packed one after the other, and where their states are. A span has consecutive tokens of one sequence.

    Attributes:
        lengths: tokens of each span, at least one; None if every span is one token.
        read: contiguous int64 [S], the row that holds the state before each span.
        write: contiguous int64 [S], the row that gets the state after each span. A span can write the row that it
            reads, but not a row that another span reads, except in a chain.
        chained: whether there can be chains. It can be true only if every span is one token. In a chain, each span
            reads the row that the previous span writes, and writes a different row. So the state after every token is
            kept.
    """

    lengths: tuple[int, ...] | None
    read: Tensor
    write: Tensor
    chained: bool = False

    def __post_init__(self) -> None:
        # Kernels read them so. PyTorch would read other rows right, and hide a mistake from tests on a CPU.
        assert self.read.is_contiguous() and self.write.is_contiguous()

    @property
    def follows(self) -> Tensor:
        """Whether each span follows the one before it in a chain: bool [S]. Only if every span is one token."""
        return (self.read == self.write.roll(1)) & (self.read != self.write)  # no span reads what the last one writes

    @property
    def chunks(self) -> Tensor:
        """All n chunks of ``CHUNK`` tokens, for kernels: int64 [n, 2], the span of each chunk, and the chunk's number
        in the span. Only if there are ``lengths``."""
        return self._on_device[0]

    @property
    def starts(self) -> Tensor:
        """The first token of each span, then the number of all tokens, for kernels: int64 [S + 1]. Only if there are
        ``lengths``."""
        return self._on_device[1]

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor]:
        """``chunks`` and ``starts``. One copy from pinned memory brings both, and the host does not wait for it."""
        assert self.lengths is not None
        chunks = [(span, chunk) for span, length in enumerate(self.lengths) for chunk in range(-(-length // CHUNK))]
        numbers = torch.tensor([*(number for pair in chunks for number in pair), *accumulate(self.lengths, initial=0)])
        if self.read.is_cuda:
            numbers = numbers.pin_memory().to(self.read.device, non_blocking=True)
        return numbers[: 2 * len(chunks)].view(-1, 2), numbers[2 * len(chunks) :]


def in_order(compute: Callable[..., Tensor], spans: Spans, *tokens: Tensor) -> Tensor:
    """Computes spans of one token each, one after another, because chains need this order. ``compute`` gets one row of
    each tensor in ``tokens`` [T, ...], and the row's span. It returns the row's result [1, ...]. Returns all results
    [T, ...]."""
    outs = []
    for row in range(len(spans.read)):
        own = slice(row, row + 1)
        outs.append(compute(*(x[own] for x in tokens), Spans(None, spans.read[own], spans.write[own])))
    return torch.cat(outs)


def in_spans(compute: Callable[..., tuple[Tensor, Tensor]], states: Tensor, spans: Spans, *tokens: Tensor) -> Tensor:
    """Computes spans of several tokens, one span after another. Only if there are ``spans.lengths``.

    Args:
        compute: gets a span's rows of each tensor in ``tokens``, and the state before the span in float32, [...]. It
            returns the results of the span's tokens [n, ...] and the state after them.
        states: [N, ...]. The rows ``spans.read`` are read, the rows ``spans.write`` are written.
        tokens: tensors [T, ...], with a row for each token.

    Returns:
        The results of all tokens [T, ...].
    """
    assert spans.lengths is not None
    outs = []
    for number, own in enumerate(zip(*(x.split(spans.lengths) for x in tokens), strict=True)):
        row = slice(number, number + 1)
        out, after = compute(*own, states[spans.read[row]].squeeze(0).float())
        states[spans.write[row]] = after.to(states.dtype).unsqueeze(0)
        outs.append(out)
    return torch.cat(outs)
