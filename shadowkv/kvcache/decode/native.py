"""Decode steps in layers with an indexer: which compressed chunks and which exact pages a step attends to.

Each page has one score for each kv head. A block of the indexer is a few pages, and some of these pages can be
compressed while the others are exact. So scores are put in the order of the pages' positions before blocks are chosen.

Shapes: B rows of a step, R segments, E exact pages of a row, P compressed pages of a segment, W pages of a sequence, H
kv heads, d dimensions of an index key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import INDEX_KEYS, Selection
from shadowkv.kvcache.policy.selected_blocks import largest_of_blocks, selected_blocks
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.store import GroupStore

NativeSelected = tuple[Selection, Tensor]
"""What a step attends to: the selected chunks of the rows with compressed pages, and the number of attended tokens of
each exact page, int64 [B, H, E]. ``PooledSelection`` returns the tokens of exact pages instead, bool [B, E * 64]."""


class NativeSelection:
    """Selects the blocks that decode steps attend to in a group of layers with an indexer. The blocks of all segments
    of a sequence compete with each other."""

    def __init__(self, store: GroupStore) -> None:
        assert store.layout.indexer is not None and store.index_keys is not None
        self.store, self.indexer, self.spec = store, store.layout.indexer, store.layout.spec
        # No compressed chunk is stored exactly elsewhere, so no chunk is marked: all pages share one page of marks,
        # read with a stride of 0.
        self._excluded = torch.zeros(1, 1, PAGE, dtype=torch.bool, device=store.compute)

    def select(
        self, layer: int, index: IndexQueries, batch: DecodeBatch, compressed: CompressedBatch
    ) -> NativeSelected:
        """Selects by index queries [B, H, d] after RoPE."""
        assert batch.exact_numbers is not None and self.store.index_keys is not None
        index_queries = index.queries
        count, heads = index_queries.shape[:2]
        segments = compressed.pages.shape[1] * (1 if batch.of_sequence is None else batch.of_sequence.shape[1])
        width = segments + batch.pages.shape[1]
        # The scores of a sequence's pages, by the page's number within the sequence. They stay -inf for numbers without
        # a page and for pages without tokens.
        sequence = batch.of_compressed(torch.arange(count, device=index_queries.device))
        number = compressed.first[:, None] // PAGE + torch.arange(compressed.pages.shape[1], device=sequence.device)
        number = number.clamp(max=width - 1)
        exact_number = batch.exact_numbers.clamp(max=width - 1)
        scores = torch.full((count, heads, width), float("-inf"), device=index_queries.device)
        scores = with_scores(
            scores, self._compressed(layer, batch.of_compressed(index_queries), compressed), sequence, number
        )
        own = torch.arange(count, device=sequence.device)
        scores = with_scores(scores, self._exact(layer, index_queries, batch), own, exact_number)

        pages = self.indexer.block_size // PAGE
        blocks = selected_blocks(largest_of_blocks(scores, pages), batch.positions, self.indexer)
        kept = blocks.repeat_interleave(pages, dim=-1)[..., :width]
        chunks = self._chunks(gathered(kept[sequence], number), compressed)
        return Selection(chunks), batch.counts.unsqueeze(1) * gathered(kept, exact_number)

    def _compressed(self, layer: int, queries: Tensor, compressed: CompressedBatch) -> Tensor:
        """The largest score in each compressed page, float32 [R, H, P]."""
        index_keys, tokens = self.store.page[INDEX_KEYS][layer], compressed.num_pages * PAGE
        return largest_of_blocks(self._of_tokens(queries, index_keys, compressed.pages, tokens), PAGE)

    def _exact(self, layer: int, queries: Tensor, batch: DecodeBatch) -> Tensor:
        """The largest score in each exact page, float32 [B, H, E]."""
        assert self.store.index_keys is not None
        width = batch.pages.shape[1]
        all_tokens = torch.full_like(batch.positions, width * PAGE)
        scores = self._of_tokens(queries, self.store.index_keys[layer], batch.pages, all_tokens)
        valid = torch.arange(PAGE, device=scores.device) < batch.counts.unsqueeze(-1)
        return scores.unflatten(-1, (width, PAGE)).masked_fill(~valid.unsqueeze(1), float("-inf")).amax(-1)

    def _chunks(self, kept: Tensor, compressed: CompressedBatch) -> Tensor:
        """The chunks int64 [R, H, k] of the pages in ``kept`` bool [R, H, P], ascending, filled up with -1."""
        of_page = PAGE // self.spec.chunk
        count = min(self.indexer.budget // PAGE, kept.shape[-1])
        page = torch.arange(kept.shape[-1], device=kept.device)
        exists = page < compressed.num_pages[:, None, None]
        last = kept.shape[-1]
        pages = torch.where(kept & exists, page, last).sort(-1).values[..., :count]
        chunks = pages.unsqueeze(-1) * of_page + torch.arange(of_page, device=kept.device)
        return torch.where((pages < last).unsqueeze(-1), chunks, -1).flatten(-2)

    def _of_tokens(self, queries: Tensor, index_keys: Tensor, pages: Tensor, num_tokens: Tensor) -> Tensor:
        """The score of each token, float32 [R, H, P * 64], computed by the op for scores of chunks, with chunks of one
        token."""
        excluded = self._excluded.expand(len(index_keys), -1, -1)
        scores: Tensor = self.store.ops.chunk_mean_scores(queries, index_keys, excluded, pages, num_tokens)[0]
        return scores.squeeze(1)


def gathered(kept: Tensor, number: Tensor) -> Tensor:
    """Returns the entries of ``kept`` [R, H, W] for the pages with numbers ``number`` [R, P], bool [R, H, P]."""
    return kept.gather(-1, number.unsqueeze(1).expand(-1, kept.shape[1], -1))


def with_scores(scores: Tensor, more: Tensor, sequence: Tensor, number: Tensor) -> Tensor:
    """Enters the scores ``more`` [R, H, P] into ``scores`` [B, H, W], and returns the result. They are scores of the
    pages with numbers ``number`` [R, P] within the sequences ``sequence`` [R]. If a page has a score already, the
    larger one is kept."""
    flat = scores.transpose(0, 1).flatten(1)  # [H, B * W]
    places = (sequence[:, None] * scores.shape[-1] + number).flatten()
    flat = flat.scatter_reduce(1, places.expand(len(flat), -1), more.transpose(0, 1).flatten(1), "amax")
    return flat.unflatten(1, (len(scores), -1)).transpose(0, 1)
