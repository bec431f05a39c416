"""``Compression``: writes full pages of exact tokens in the policy's form. ``Storing`` and ``Decode`` call it.

Pages of generated tokens use the state of the last segment, as long as it is valid (``growth.py``).

Shapes: L layers, n pages or slots, H kv heads, C chunks per page.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.parts.base import COMPRESSED_AT_ONCE, EXCLUDED, CompressedTokens
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import Tables
from shadowkv.kvcache.sequences.store import GroupStore


class Compression:
    """Writes compressed pages of one group of layers."""

    def __init__(self, store: GroupStore, tables: Tables) -> None:
        self.store, self.parts, self.tables = store, store.layout.parts, tables
        self.spec = store.layout.spec

    def write(self, tokens: CompressedTokens, excluded: Tensor | None = None) -> None:
        """Compresses full pages of tokens and writes them. ``excluded`` bool [L, n, H, C] marks chunks that stay exact
        (sink, outliers); None if no chunk stays exact."""
        layers = tokens.keys.shape[0]
        for part in (self.parts.keys, self.parts.index, self.parts.values):
            for portion in tokens.split(max(1, COMPRESSED_AT_ONCE // layers)):
                part.compress(self.store, portion)
        if excluded is not None:
            self.parts.index.exclude(self.store, tokens.layers, tokens.pages, excluded)
        if not self.store.layout.excluded_fields:
            return
        if excluded is None:
            shape = layers, len(tokens.pages), *self.store.page[EXCLUDED].shape[2:]
            # A tensor, because a scalar would be copied from the host, which a captured graph cannot do.
            excluded = torch.zeros(shape, dtype=torch.bool, device=self.store.compute)
        self.store.write(EXCLUDED, tokens.layers, tokens.pages, excluded)

    def due(self, slots: np.ndarray) -> np.ndarray:
        """Returns bool [n]: which of ``slots`` have a page to compress. A sequence has one if its tail is at least a
        page longer than the local window, and its state is valid for the tail's oldest page."""
        tables = self.tables
        length, compressed = tables.length[slots], tables.compressed[slots]
        valid = (tables.segments[slots] > 0) & (compressed + PAGE <= tables.valid_until[slots])
        return valid & (length - compressed >= self.spec.local + PAGE)

    def numbers(self, slots: np.ndarray) -> np.ndarray:
        """Returns the numbers for ``compress_pages``, int64 [6, n], for the oldest page in the exact tail of the
        sequence in each of ``slots``."""
        tables = self.tables
        page, segment = tables.compressed[slots] // PAGE, tables.segment_slots[slots, tables.segments[slots] - 1]
        column = tables.static_pages[slots] + page % tables.ring_pages[slots]
        return np.stack((slots, column, page, segment, page - tables.first[segment] // PAGE, tables.state[segment]))

    @property
    def padding(self) -> np.ndarray:
        """The numbers of a padding page, int64 [6]."""
        segment = self.tables.padding_segment_slot
        return np.array((self.tables.padding_slot, 0, 0, segment, 0, self.tables.state[segment]))

    def compress_pages(self, numbers: Tensor) -> None:
        """Compresses pages in all layers of the group.

        Args:
            numbers: int64 [6, n]: slots of sequences, columns in their exact page tables, page numbers, slots of
                segments, columns in the segments' page tables, and states.
        """
        slots, column, page_number, segment, segment_column, states = numbers
        tables = self.tables
        exact, pages, value_pages = (
            table[where].long()
            for table, where in (
                (tables.exact, (slots, column)),
                (tables.pages, (segment, segment_column)),
                (tables.value_pages, (segment, segment_column)),
            )
        )
        positions = page_number[:, None] * PAGE + torch.arange(PAGE, device=self.store.compute)
        layers = slice(0, self.store.layout.shape.num_layers)
        rope_keys, *others = (x[layers][:, exact].transpose(2, 3) for x in self.store.exact)
        at = positions.expand(len(rope_keys), -1, -1)
        keys = self.store.ops.apply_rope(rope_keys, at, self.store.rotary, inverse=True)
        self.write(CompressedTokens(layers, states, page_number * PAGE, pages, value_pages, keys, rope_keys, *others))
