"""``RebuiltTokens``: rebuilds a segment's compressed tokens as plain keys and values, in long spans. A later turn's
tokens attend to them.

Exact tokens (sink and outliers) replace their own approximations. So every token occurs once, and attention needs no
mask. Values on the host cross the bus one span ahead of attention.

Shapes: H kv heads, m tokens of a span, n exact tokens, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.memory.streams import SideStream
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.store import CachedSegment, GroupStore

SPAN_PAGES = 512
"""Pages of a span: 32,768 tokens, which are 64 MiB of keys at 8 heads of 128 dimensions. Two spans exist at a time."""


class RebuiltTokens:
    """Rebuilds compressed tokens of one group of layers, one segment at a time."""

    def __init__(self, store: GroupStore) -> None:
        self.store, self.parts, self.ops = store, store.layout.parts, store.ops
        self.spec, self.shape = store.layout.spec, store.layout.shape
        self.across_bus = self.spec.place == "host"
        self.side_stream = SideStream(store.compute, self.across_bus)

    def spans(self, layer: int, segment: CachedSegment) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields RoPE-rotated keys and values [H, m, d] of each span. The caller must launch all work on a span, on the
        current stream, before it requests the next."""
        row, static = segment.row, segment.static
        pages = row.pages.shape[1]
        step = min(SPAN_PAGES, pages)
        spans = [(first, min(first + step, pages)) for first in range(0, pages, step)]
        # Exact tokens that are not in the span are written to one extra row.
        size = (2, self.shape.num_kv_heads, step * PAGE + 1, self.shape.head_dim)
        buffers = [torch.empty(size, dtype=self.store.k.dtype, device=self.store.compute) for _ in spans[:2]]
        keys_and_values = self.store.read_exact(slice(layer, layer + 1), static)[:2]
        exact = torch.stack(keys_and_values)[:, 0].transpose(1, 2)
        head = torch.arange(size[1], device=exact.device)[:, None]
        exact_rows = self._rows_of_exact(layer, row, exact.shape[2], step, len(spans))
        key_source, value_source = (x.source(self.store, layer, row) for x in (self.parts.keys, self.parts.values))

        def read_values(i: int) -> Callable[[], None]:
            """Starts to read a span's values. Returns a function that makes the current stream wait for them."""
            first, last = spans[i]
            out = buffers[i % 2][1, :, : (last - first) * PAGE]
            return self.side_stream.start(lambda: self.ops.rebuild_rows(value_source, first, out, self.across_bus))

        arrived = read_values(0)
        for i, (first, last) in enumerate(spans):
            wait = arrived
            if i + 1 < len(spans):  # the other buffer is free: attention to it has been launched
                arrived = read_values(i + 1)
            block, count = buffers[i % 2], (last - first) * PAGE
            self.ops.rebuild_rows(key_source, first, block[0, :, :count], False)
            wait()
            block[:, head, exact_rows[i]] = exact
            yield block[0, :, :count], block[1, :, :count]

    def _rows_of_exact(self, layer: int, row: CompressedBatch, static_tokens: int, step: int, count: int) -> Tensor:
        """Returns, for each of ``count`` spans of ``step`` pages, the row of each exact token in the span, int64
        [count, H, n]. A token that is not in the span gets the extra row."""
        chunk, rows, exact = self.spec.chunk, step * PAGE, static_tokens // self.spec.chunk
        if self.spec.outliers:
            excluded = self.store.excluded(layer, row.pages, row.first)[0]
            chunks = excluded.to(torch.uint8).topk(exact).indices  # each head has ``exact`` such chunks
        else:  # only the sink is exact
            chunks = torch.arange(exact, device=row.pages.device).expand(self.shape.num_kv_heads, -1)
        position = (chunks.unsqueeze(-1) * chunk + torch.arange(chunk, device=chunks.device)).flatten(1)
        row_of_span = position - torch.arange(0, count * rows, rows, device=chunks.device)[:, None, None]
        return row_of_span.masked_fill_((row_of_span < 0) | (row_of_span >= rows), rows)
