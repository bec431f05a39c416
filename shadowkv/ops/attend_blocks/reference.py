"""Attention over selected blocks in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.select_blocks.reference import BLOCK


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes causal attention of the last n of m positions over selected blocks of keys and values.

    Args:
        q: [n, H_q, d], n at least 1, for H_q query heads of d dimensions.
        k, v: [m, H, d], for H kv heads.
        indices: int32 [H_q, tiles, blocks], the blocks of 128 keys that each tile of 128 queries of a head attends to,
            in ascending order. They include the blocks that hold keys of the tile's own positions.
        counts: int32 [H_q, tiles], how many of a tile's indices are valid.
        weights: float32 [H_q, tiles, blocks], the number of blocks that each selected block stands for. It multiplies
            the block's terms in the numerator and the denominator of the softmax. It is 1 for blocks that hold keys of
            the tile's own positions.

    Returns:
        out [n, H_q, d] and its log-sum-exp, float32 [n, H_q].
    """
    n, query_heads, dim = q.shape
    m, heads = k.shape[:2]
    out, lse = torch.empty_like(q), torch.empty(n, query_heads, dtype=torch.float32, device=q.device)
    for head in range(query_heads):
        shared = head * heads // query_heads
        for tile in range(indices.shape[1]):
            rows = slice(tile * BLOCK, min(n, (tile + 1) * BLOCK))
            chosen = indices[head, tile, : int(counts[head, tile])].long()
            keys = (chosen[:, None] * BLOCK + torch.arange(BLOCK, device=q.device)).flatten()
            keys = keys[keys < m]
            position = m - n + torch.arange(rows.start, rows.stop, device=q.device)
            scores = q[rows, head].float() @ k[keys, shared].float().T * dim**-0.5
            scores += weights[head, tile, : len(chosen)].log().repeat_interleave(BLOCK)[: len(keys)]
            scores.masked_fill_(keys > position[:, None], float("-inf"))
            out[rows, head] = (scores.softmax(-1) @ v[keys, shared].float()).to(q.dtype)
            lse[rows, head] = scores.logsumexp(-1)
    return out, lse
