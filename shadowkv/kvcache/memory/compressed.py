"""Compressed pages and fitted states, by name and layer: what parts may touch of a cache's memory, and which of the
pages a batch's rows have.
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


class CompressedStore:
    """Tensors by name and layer of a group of layers, and what else parts compute with.

    Args:
        head_dim: the size of the fixed rotations.
        across_bus: the names of the fields of ``page`` that are in the host's memory.
        weights: for each layer, what the model has for the policy's parts, by name.

    Attributes:
        ops: the cache's ops.
        rotary: tables for the positions of its tokens.
        layers: which layers of the model they are: parts count those of the group.
        compute: the device that it computes on.
        page: per field [num_layers, page ids, *field.shape], compressed pages.
        state: per field [num_layers, states, *field.shape], fitted states.
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
        """The fixed rotation of that name, float32 [d, d], where the cache computes: created once, by ``matrix``."""
        if name not in self._rotations:
            self._rotations[name] = matrix(self._head_dim, name).to(self.compute)
        return self._rotations[name]

    def write(self, name: str, layers: slice, pages: Tensor, rows: Tensor) -> None:
        """Writes pages [L, n, *field.shape] of some layers."""
        self.page[name][layers][:, pages] = rows

    def write_heads(self, name: str, layers: slice, pages: Tensor, tokens: Tensor) -> None:
        """Writes [L, n, 64, H, x] into a field of shape [H, C, c, x]."""
        self.ops.write_rows(tokens, self.page[name][layers], pages, name in self._across_bus)


@dataclass(frozen=True)
class CompressedBatch:
    """Compressed pages of R segments of a batch's sequences: of all of them, or of those that are compressed.

    Attributes:
        slots: int64 [R], their slots in the page tables and in whatever else each segment has of its own.
        states: int64 [R], their fitted states.
        first: int64 [R], positions of their first tokens.
        pages: int64 [R, P], ids of their compressed pages; anything past a segment's end.
        value_pages: int64 [R, P], ids of the pages that hold ``values``.
        num_pages: int64 [R], compressed pages of each; ragged.
        num_chunks: int64 [R], their chunks.
        budget: int64 [R], chunks to select by top-k per kv head.
        max_budget: no row selects more, top-k and sampled.
        sampling: chunks to sample in addition, by the seeds of requests and the positions of the new tokens: a
            different sample in every step; None where the policy samples none.
        overlapped: whether another micro-batch computes while values of these rows are fetched.
        span: for a policy without an index, the tokens of each row that are attended to, those after the sink: the
            first and the last + 1, int64 [R] each. None for other policies.
        most: int64 [R], chunks that an index selects of each at the most, top-k and sampled. None for policies without
            one.
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
    most: Tensor | None = None

    def part(self, rows: slice) -> CompressedBatch:
        """Some of the rows, for values on the host that an index selects from: nothing is sampled from those."""
        assert self.sampling is None and self.span is None
        names = ("slots", "states", "first", "pages", "value_pages", "num_pages", "num_chunks", "budget")
        most = None if self.most is None else self.most[rows]
        return replace(self, most=most, **{name: getattr(self, name)[rows] for name in names})
