"""``CompressedStore``: compressed pages and fitted states by name and layer, for parts. ``CompressedBatch``: the
compressed pages of a batch's rows.

Shapes: L layers, n pages, R rows (one for each segment of a batch), P compressed pages of a row, H kv heads, C chunks
per page, c tokens per chunk, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.registry import Ops
from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sampling import Sampling
from shadowkv.ops.sequence_rows import SequenceRows


class CompressedStore:
    """The memory of a group of layers as parts see it, by field name and layer. Layers are numbered within the group.

    Args:
        head_dim: size of the fixed rotations.
        across_bus: names of the fields of ``page`` that are in host memory.
        weights: for each layer, the weights that the policy's parts need, by name.

    Attributes:
        ops: the cache's ops.
        rotary: the group's RoPE tables.
        layers: the group's layers, as numbered in the model.
        compute: the device of the attention.
        page: compressed pages, [num_layers, page ids, *field.shape] for each field.
        state: fitted states, [num_layers, states, *field.shape] for each field.
    """

    def __init__(
        self,
        ops: Ops,
        rotary: RotaryTables,
        layers: tuple[int, ...],
        compute: torch.device,
        head_dim: int,
        page: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        across_bus: Collection[str],
        weights: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        self.ops, self.rotary, self.layers, self.compute = ops, rotary, layers, compute
        self.page, self.state, self.weights = page, state, weights
        self._head_dim, self._across_bus = head_dim, across_bus
        self._rotations: dict[str, Tensor] = {}

    def rotation(self, name: str, matrix: Callable[[int, str], Tensor] = random_rotation) -> Tensor:
        """The fixed rotation ``name``, float32 [d, d], on the device of the attention. The first call makes it by
        calling ``matrix`` with the head dim and the name."""
        if name not in self._rotations:
            self._rotations[name] = matrix(self._head_dim, name).to(self.compute)
        return self._rotations[name]

    def write(self, name: str, layers: slice, pages: Tensor, rows: Tensor) -> None:
        """Writes ``rows`` [L, n, *field.shape] to pages int64 [n] of some layers."""
        self.page[name][layers][:, pages] = rows

    def write_heads(self, name: str, layers: slice, pages: Tensor, tokens: Tensor) -> None:
        """Writes ``tokens`` [L, n, 64, H, x], with x elements per row, to pages int64 [n] of a field of shape [H, C, c,
        x]."""
        self.ops.write_rows(tokens, self.page[name][layers], pages, name in self._across_bus)


@dataclass(frozen=True)
class CompressedBatch:
    """Compressed pages of R segments of a batch.

    Attributes:
        slots: int64 [R], slots of the segments in the page tables and in the fetch buffer.
        states: int64 [R], fitted states of the segments.
        first: int64 [R], positions of the segments' first tokens.
        pages: int64 [R, P], ids of the segments' compressed pages; arbitrary past a segment's end.
        value_pages: int64 [R, P], ids of the pages with the segments' values, if values are on the host; otherwise
            equal to ``pages``.
        num_pages: int64 [R], number of compressed pages of each segment.
        num_chunks: int64 [R], number of chunks of each segment.
        budget: int64 [R], chunks to select by top-k per kv head.
        max_budget: maximum number of chunks that a row selects, by top-k and by sampling.
        sampling: number of chunks to sample in addition, and seeds. A seed depends on the request and on the position
            of the new token, so every step has another sample. None if the policy does not sample.
        overlapped: whether another micro-batch computes while values of these rows are fetched.
        span: in a step that attends to all tokens, the range of compressed tokens that each row attends to, without the
            sink: first and last + 1 within the segment, int64 [R] each. None in steps that select.
        of_segments: in a step that attends to all tokens, which rows are of one segment, for several tokens of its
            sequence. None if each row reads its pages.
        most: int64 [R], maximum number of chunks that each row selects, by top-k and by sampling. None in steps that do
            not select.
    """

    slots: Tensor
    states: Tensor
    first: Tensor
    pages: Tensor
    value_pages: Tensor
    num_pages: Tensor
    num_chunks: Tensor
    budget: Tensor
    max_budget: int
    sampling: Sampling | None = None
    overlapped: bool = False
    span: tuple[Tensor, Tensor] | None = None
    of_segments: SequenceRows | None = None
    most: Tensor | None = None

    def part(self, rows: slice) -> CompressedBatch:
        """Returns the batch of some rows, for values on the host or for inspection. The batch must have neither
        ``sampling`` nor ``span``."""
        assert self.sampling is None and self.span is None
        names = ("slots", "states", "first", "pages", "value_pages", "num_pages", "num_chunks", "budget")
        most = None if self.most is None else self.most[rows]
        return replace(self, most=most, **{name: getattr(self, name)[rows] for name in names})
