"""Decode steps in layers whose indexer has one key for each block of a few tokens (QSA, of the Qwen4 preview).

Shapes: B rows of a step, R segments, E exact pages of a row, P compressed pages of a segment, W pages of a sequence, H
kv heads, H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.decode.native import NativeSelected, gathered, with_scores
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import INDEX_KEYS, Selection
from shadowkv.kvcache.policy.selected_blocks import selected_complete_blocks
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.store import GroupStore


class PooledSelection:
    """Selects the blocks that decode steps attend to in a group of layers. The blocks of all segments of a sequence
    compete with each other. Each compressed chunk is one block of the indexer. All kv heads attend to the same
    blocks."""

    def __init__(self, store: GroupStore) -> None:
        assert store.layout.indexer is not None and store.layout.indexer.pooled is not None
        self.store, self.indexer = store, store.layout.indexer
        self.of_page = PAGE // self.indexer.block_size

    def select(
        self, layer: int, index: IndexQueries, batch: DecodeBatch, compressed: CompressedBatch
    ) -> NativeSelected:
        """Selects by index queries [B, H, d] after RoPE. The second result is bool [B, E * 64]: which tokens of exact
        pages are attended to."""
        assert batch.exact_numbers is not None and self.store.index_keys is not None
        count, device = len(batch.positions), batch.positions.device
        segments = compressed.pages.shape[1] * (1 if batch.of_sequence is None else batch.of_sequence.shape[1])
        width = segments + batch.pages.shape[1]
        own = torch.arange(count, device=device)
        sequence = batch.of_compressed(own)
        number = compressed.first[:, None] // PAGE + torch.arange(compressed.pages.shape[1], device=device)
        number, exact = number.clamp(max=width - 1), batch.exact_numbers.clamp(max=width - 1)

        exists = torch.arange(compressed.pages.shape[1], device=device) < compressed.num_pages[:, None]
        complete = torch.arange(1, self.of_page + 1, device=device) * self.indexer.block_size
        queries = batch.of_compressed(index.queries)
        of_compressed = self._scores(queries, index, self.store.page[INDEX_KEYS][layer], compressed.pages, number)
        of_compressed = of_compressed.masked_fill(~exists.unsqueeze(-1), float("-inf"))
        of_exact = self._scores(index.queries, index, self.store.index_keys[layer], batch.pages, exact)
        of_exact = of_exact.masked_fill(complete > batch.counts.unsqueeze(-1), float("-inf"))

        scores = torch.full((count, self.of_page, width), float("-inf"), device=device)
        scores = with_scores(scores, of_compressed.mT, sequence, number)
        scores = with_scores(scores, of_exact.mT, own, exact)
        chosen = selected_complete_blocks(scores.mT.flatten(1), batch.positions, self.indexer)
        kept = chosen.unflatten(-1, (width, -1)).mT  # [B, blocks of a page, W]

        chunks = self._chunks((gathered(kept[sequence], number).mT & exists.unsqueeze(-1)).flatten(1))
        heads = self.store.layout.shape.num_kv_heads
        tokens = gathered(kept, exact).mT.repeat_interleave(self.indexer.block_size, dim=-1)  # [B, E, 64]
        token = torch.arange(PAGE, device=device)
        position = exact.unsqueeze(-1) * PAGE + token
        block = self.indexer.block_size
        # The block that is not complete yet is always attended to.
        tokens = tokens | (position // block == ((batch.positions + 1) // block)[:, None, None])
        valid = token < batch.counts.unsqueeze(-1)
        return Selection(chunks.unsqueeze(1).expand(-1, heads, -1).contiguous()), (tokens & valid).flatten(1)

    def _scores(self, queries: Tensor, index: IndexQueries, keys: Tensor, pages: Tensor, number: Tensor) -> Tensor:
        """Returns the scores of the blocks in ``pages`` [R, P], float32 [R, P, blocks of a page]. ``number`` [R, P] are
        the numbers of the pages within their sequences."""
        store, norm = self.store, self.store.key_norm(index)
        scores: Tensor = store.ops.pooled_scores(
            queries, keys.squeeze(1), pages, number * PAGE, norm, store.rotary, self.indexer.block_size
        )
        return scores

    def _chunks(self, kept: Tensor) -> Tensor:
        """The chunks int64 [R, k] in ``kept`` bool [R, P * blocks], ascending, filled up with -1."""
        last = kept.shape[-1]
        chunk = torch.arange(last, device=kept.device)
        chunks = torch.where(kept, chunk, last).sort(-1).values[:, : min(self.indexer.topk_blocks, last)]
        return torch.where(chunks < last, chunks, -1)


def attend_tokens(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Attends with queries [B, H_q, d] to the tokens ``kept`` bool [B, E * 64] of exact ``pages`` int64 [B, E] in k, v
    [pages, H, 64, d]. Returns [B, H_q, d] and log-sum-exps, float32 [B, H_q]. For a row without kept tokens, these are
    0 and -inf."""
    keys, values = (x[pages].transpose(1, 2).flatten(2, 3) for x in (k, v))  # [B, H, E * 64, d]
    queries = q.unflatten(1, (keys.shape[1], -1))
    scores = (queries @ keys.mT).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~kept[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
    values = torch.where(kept[:, None, :, None], values, 0)  # unwritten rows may not be finite
    return (weights.to(v.dtype) @ values).flatten(1, 2), lse.flatten(1)
