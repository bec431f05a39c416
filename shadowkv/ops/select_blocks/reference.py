"""Selection of blocks by a few sampled queries per tile, in PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 128
"""Keys of a block and queries of a tile."""

SAMPLED, SPREAD = 8, 4
"""Queries of a tile whose attention is computed to choose its blocks, and those of them that are spread evenly."""

SINK_BLOCKS, LOCAL_BLOCKS = 2, 4
"""First blocks, and blocks before a tile's own, that the tile always attends to."""


def select_blocks(q: Tensor, k: Tensor, mass: float, whole: int = 0) -> tuple[Tensor, Tensor]:
    """The blocks of keys that each tile of the last n of m positions attends to.

    A tile always attends to the first blocks, to the newest ones and to its own (``SINK_BLOCKS``, ``LOCAL_BLOCKS``).
    All other blocks hold only keys before it. Of these it leaves out the least, by the largest share that one has of
    the softmax of a sampled query (``sample_queries``) over all keys that the query sees: as many as leave every one
    of these queries with more than ``mass`` of its softmax.

    Args:
        q: RoPE-rotated queries [n, H_q, d], n at least 1.
        k: RoPE-rotated keys [m, H, d].
        mass: share of its softmax that every sampled query attends to at the least, above 0; with 1 all is kept.
        whole: tiles that hold one of the last ``whole`` queries, and a last tile that is not full, attend to all
            blocks.

    Returns:
        int32 [H_q, tiles, blocks], ascending, arbitrary past their number; and int32 [H_q, tiles], their number.
    """
    n, query_heads, dim = q.shape
    m, heads = k.shape[:2]
    tiles, blocks = -(-n // BLOCK), -(-m // BLOCK)
    indices = torch.zeros(query_heads, tiles, blocks, dtype=torch.int32, device=q.device)
    counts = torch.zeros(query_heads, tiles, dtype=torch.int32, device=q.device)
    sampled = sample_queries(q).long()
    for tile in range(tiles):
        first = m - n + tile * BLOCK
        end = (min(first + BLOCK, m) - 1) // BLOCK + 1
        free = slice(SINK_BLOCKS, max(SINK_BLOCKS, first // BLOCK - LOCAL_BLOCKS + 1))
        chosen = torch.ones(query_heads, end, dtype=torch.bool, device=q.device)
        if free.start < free.stop and (tile + 1) * BLOCK <= n - whole:
            rows = sampled[:, tile]  # [H_q, sampled]
            queries = q.transpose(0, 1).gather(1, rows[..., None].expand(-1, -1, dim)).float().unflatten(0, (heads, -1))
            scores = torch.einsum("hgrd,mhd->hgrm", queries, k[: end * BLOCK].float()).flatten(0, 1) * dim**-0.5
            later = torch.arange(scores.shape[2], device=q.device) > m - n + rows[..., None]
            shares = scores.masked_fill(later, -math.inf).softmax(-1)[..., free.start * BLOCK : free.stop * BLOCK]
            shares = shares.unflatten(-1, (-1, BLOCK)).sum(-1)  # [H_q, sampled, free]
            order = shares.amax(1).argsort(-1)
            left_out = shares.gather(2, order[:, None].expand_as(shares)).cumsum(-1).amax(1)
            chosen[:, free] = torch.zeros_like(chosen[:, free]).scatter(1, order, left_out >= 1 - mass)
        for head in range(query_heads):
            listed = chosen[head].nonzero().flatten()
            indices[head, tile, : len(listed)] = listed
            counts[head, tile] = len(listed)
    return indices, counts


def sample_queries(q: Tensor) -> Tensor:
    """Rows of ``q`` [n, H_q, d] that represent the tiles, int32 [H_q, tiles, ``SAMPLED``].

    ``SPREAD`` evenly spaced ones, the tile's last among them, which stand for most of its queries, then repeatedly the
    one farthest from those already sampled (Gonzalez 1985): this catches what only one token looks for.
    """
    n, query_heads, _ = q.shape
    tiles = -(-n // BLOCK)
    sampled = torch.empty(query_heads, tiles, SAMPLED, dtype=torch.int32, device=q.device)
    for tile in range(tiles):
        start = tile * BLOCK
        rows = q[start : start + BLOCK].float().transpose(0, 1)
        apart = torch.cdist(rows, rows)  # [H_q, rows, rows]
        nearest = torch.full(rows.shape[:2], math.inf, device=q.device)
        for number in range(SAMPLED):
            if number < SPREAD:
                row = min(BLOCK // SPREAD * (number + 1), rows.shape[1]) - 1
                newest = torch.full((query_heads,), row, device=q.device)
            else:
                newest = nearest.argmax(1)
            sampled[:, tile, number] = start + newest
            nearest = torch.minimum(nearest, apart[torch.arange(query_heads, device=q.device), newest])
    return sampled
