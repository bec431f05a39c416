"""Decode steps in layers with an indexer: which compressed chunks and which exact pages a step attends to.

Scores are those of whole pages. A block of the indexer is a few pages, and some of its pages can be compressed while
the others are exact, so pages are put in order of their positions before blocks are chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.decode.batch import DecodeBatch
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.parts.index_native import INDEX_KEYS, largest_of_blocks, selected_blocks
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.store import GroupStore


NativeSelected = tuple[Selection, Tensor]
"""The compressed chunks of the rows with compressed pages, and the number of attended tokens of each exact page, int64
[B, H, E]."""


class NativeSelection:
    """Selects for the steps of a group of layers with an indexer.

    Every sequence has one segment, because parts with fitted states are not supported here (``parts.resolve``).
    """

    def __init__(self, store: GroupStore) -> None:
        assert store.layout.indexer is not None and store.index_keys is not None
        self.store, self.indexer, self.spec = store, store.layout.indexer, store.layout.spec
        # No compressed chunk is stored elsewhere. One page stands for all: the op reads it with a stride of 0.
        self._excluded = torch.zeros(1, 1, PAGE, dtype=torch.bool, device=store.compute)

    def select(
        self, layer: int, index_queries: Tensor, batch: DecodeBatch, compressed: CompressedBatch
    ) -> NativeSelected:
        """Selects by index queries [B, H, d] after RoPE."""
        assert batch.exact_numbers is not None and self.store.index_keys is not None
        rows = batch.of_compressed(index_queries)
        before = self._of_pages(rows, self.store.page[INDEX_KEYS][layer], compressed.pages, compressed.num_pages * PAGE)
        if batch.sequence is not None:  # on a CPU only some of the sequences are compressed
            none = before.new_full((len(index_queries), *before.shape[1:]), float("-inf"))
            before = none.index_copy(0, batch.sequence, before)
        width = batch.pages.shape[1]
        all_tokens = torch.full_like(batch.positions, width * PAGE)
        exact = self._of_tokens(index_queries, self.store.index_keys[layer], batch.pages, all_tokens)
        valid = torch.arange(PAGE, device=exact.device) < batch.counts.unsqueeze(-1)
        exact = exact.unflatten(-1, (width, PAGE)).masked_fill(~valid.unsqueeze(1), float("-inf")).amax(-1)

        scores = torch.nn.functional.pad(before, (0, width), value=float("-inf"))
        numbers = batch.exact_numbers.clamp(0, scores.shape[-1] - 1).unsqueeze(1).expand_as(exact)
        scores = scores.scatter_reduce(-1, numbers, exact, "amax")
        pages = self.indexer.block_size // PAGE
        blocks = selected_blocks(largest_of_blocks(scores, pages), batch.positions, self.indexer)
        kept = blocks.repeat_interleave(pages, dim=-1)[..., : scores.shape[-1]]
        counts = batch.counts.unsqueeze(1) * kept.gather(-1, numbers)
        return Selection(self._chunks(batch.of_compressed(kept)[..., : before.shape[-1]], compressed)), counts

    def _chunks(self, kept: Tensor, compressed: CompressedBatch) -> Tensor:
        """The chunks int64 [R, H, k] of the pages in ``kept`` bool [R, H, P], ascending, filled up with -1. k is that of
        the plan."""
        of_page = PAGE // self.spec.chunk
        count = min(self.indexer.budget // PAGE, kept.shape[-1])
        page = torch.arange(kept.shape[-1], device=kept.device)
        exists = page < compressed.num_pages[:, None, None]
        last = kept.shape[-1]
        pages = torch.where(kept & exists, page, last).sort(-1).values[..., :count]
        chunks = pages.unsqueeze(-1) * of_page + torch.arange(of_page, device=kept.device)
        return torch.where((pages < last).unsqueeze(-1), chunks, -1).flatten(-2)

    def _of_pages(self, queries: Tensor, index_keys: Tensor, pages: Tensor, num_tokens: Tensor) -> Tensor:
        """The largest score of each page, float32 [R, H, P]."""
        return largest_of_blocks(self._of_tokens(queries, index_keys, pages, num_tokens), PAGE)

    def _of_tokens(self, queries: Tensor, index_keys: Tensor, pages: Tensor, num_tokens: Tensor) -> Tensor:
        """The score of each token, float32 [R, H, P * 64]: a chunk's mean key is here the index key of one token."""
        excluded = self._excluded.expand(len(index_keys), -1, -1)
        scores: Tensor = self.store.ops.chunk_mean_scores(queries, index_keys, excluded, pages, num_tokens)[0]
        return scores.squeeze(1)
