"""Prompts in layers with an indexer: every query attends to the blocks that it selects, in PyTorch.

Queries are computed in tiles, so that scores and masks stay small. Every query is multiplied by all keys, and scores of
keys that it does not select are masked: this is correct, but no faster than dense attention.

Shapes: H kv heads (or heads of index queries), H_q query heads, G query heads per kv head, d dimensions of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shadowkv.kvcache.policy.selected_blocks import largest_of_blocks, selected_blocks, selected_complete_blocks
from shadowkv.kvcache.policy.shape import Indexer, IndexQueries, ModelShape
from shadowkv.kvcache.sequences.store import GroupStore
from shadowkv.ops.pooled_scores.reference import block_scores

SCORES_AT_ONCE = 2**24
"""Maximum number of scores of index queries in memory at a time, unless a single query has more. Scores of attention
itself do not count, because attention kernels do not store them."""

SCORE_BYTES = 3 * 4 + 1
"""Bytes for each score: float32 for the score, for its masked copy, and for this copy padded to whole blocks; and one
byte for the mask."""


def selecting_bytes(shape: ModelShape, queries: int, keys: int, dtype: torch.dtype) -> int:
    """Returns the maximum number of bytes that ``attend_selected_blocks`` allocates, plus the bytes of the joined index
    keys of a later turn. Returns 0 if no query sees more tokens than it attends to, or if no layer has an indexer.

    Args:
        queries, keys: numbers of queries and keys, n and m in ``attend_selected_blocks``.
        dtype: dtype of queries and keys.
    """
    selecting = [kind.indexer for kind in shape.kinds if kind.indexer is not None and keys > kind.indexer.budget]
    if not selecting:
        return 0
    of_query, of_keys = shape.num_kv_heads * keys, 4 * keys * shape.head_dim
    scores = min(queries * of_query, max(SCORES_AT_ONCE, of_query))
    results = 2 * queries * shape.num_query_heads * shape.head_dim  # results of the tiles, and the joined result
    needs = [
        SCORE_BYTES * scores + of_keys
        if one.pooled is None
        else max(
            # First the scores of all heads and their sums exist, later the chosen blocks and four masks of tokens.
            scores // shape.num_kv_heads * max(-(-4 * (one.pooled.heads + 1) // one.block_size), 5),
            of_keys + of_keys // one.block_size,
        )
        for one in selecting
    ]
    return max(needs) + (results + keys * shape.head_dim) * dtype.itemsize


def attend_selected_blocks(
    store: GroupStore, q: Tensor, index: IndexQueries, k: Tensor, v: Tensor, index_keys: Tensor
) -> Tensor:
    """Attends with the queries of the last n of m positions. Each query attends to the blocks that it selects, without
    tokens after its own.

    Args:
        store: the layers' store, with their indexer.
        q: [n, H_q, d], after RoPE.
        index: index queries [n, H, d] after RoPE.
        k, v: [m, H, d], keys after RoPE and values.
        index_keys: [m, 1, d], as pages store them.

    Returns:
        [n, H_q, d].
    """
    indexer = store.layout.indexer
    assert indexer is not None, "the layers have no indexer"
    count, seen, heads = len(q), len(k), k.shape[1]
    blocks = None
    if indexer.pooled is not None:
        whole = index_keys[: seen - seen % indexer.block_size, 0].unflatten(0, (-1, indexer.block_size))
        first = torch.arange(len(whole), device=q.device) * indexer.block_size
        blocks = store.block_keys(whole, first, index)
    tile = max(1, SCORES_AT_ONCE // (heads * seen))
    parts = []
    for start in range(0, count, tile):
        rows = slice(start, min(start + tile, count))
        positions = torch.arange(seen - count + rows.start, seen - count + rows.stop, device=q.device)
        last = seen - count + rows.stop  # number of tokens that the tile's last query can see
        if blocks is None:
            kept = _attended(index.queries[rows], index_keys[:last], positions, indexer)
        else:
            kept = _attended_pooled(index.queries[rows], blocks, last, positions, indexer)
        queries = q[rows].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, G, n, d]
        keys, values = (x[:last].transpose(0, 1).unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for x in (k, v))
        out = scaled_dot_product_attention(queries, keys, values, kept.transpose(0, 1).unsqueeze(1))
        parts.append(out.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(parts)


def _attended(index_queries: Tensor, index_keys: Tensor, positions: Tensor, indexer: Indexer) -> Tensor:
    """Returns bool [n, H, m]: True for those of the first m tokens that the queries at ``positions`` [n] attend to."""
    scores = index_queries.float() @ index_keys.squeeze(1).float().T
    token = torch.arange(scores.shape[-1], device=scores.device)
    future = (token > positions[:, None]).unsqueeze(1)
    scores = largest_of_blocks(scores.masked_fill(future, float("-inf")), indexer.block_size)
    blocks = selected_blocks(scores, positions, indexer)
    return blocks.repeat_interleave(indexer.block_size, dim=-1)[..., : len(token)] & ~future


def _attended_pooled(queries: Tensor, blocks: Tensor, count: int, positions: Tensor, indexer: Indexer) -> Tensor:
    """Returns bool [n, 1, count]: True for those of the first ``count`` tokens that the queries at ``positions`` [n]
    attend to. Blocks are chosen by their keys [N, d]."""
    token = torch.arange(count, device=blocks.device)
    own = (positions[:, None] + 1) // indexer.block_size  # the incomplete block, always attended to
    kept = token // indexer.block_size == own
    if len(blocks):
        chosen = selected_complete_blocks(block_scores(queries, blocks), positions, indexer)
        of_tokens = chosen.repeat_interleave(indexer.block_size, dim=-1)[:, :count]
        kept[:, : of_tokens.shape[1]] |= of_tokens
    return (kept & (token <= positions[:, None])).unsqueeze(1)
