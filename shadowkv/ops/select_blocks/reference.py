"""Selection of blocks by a few sampled queries of each tile, in PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 128
"""Keys of a block and queries of a tile."""

SAMPLED = 8
"""Queries of a tile whose attention is computed to choose its blocks, evenly spread, its last one among them."""

SINK_BLOCKS, LOCAL_BLOCKS = 2, 4
"""First blocks, and those before a tile's own, that it always attends to."""


def select_blocks(q: Tensor, k: Tensor, share: float, most: float, whole: int = 0) -> tuple[Tensor, Tensor]:
    """The blocks of keys that each tile of the last n of m positions attends to.

    A tile always attends to the first blocks, to the newest ones and to its own (``SINK_BLOCKS``, ``LOCAL_BLOCKS``).
    Of all others, which hold nothing but keys before it, it takes those that have at least ``share`` of the softmax of
    one of its sampled queries over all these. Where that is more than ``most`` of all blocks that it may attend to,
    ``share`` is doubled until it is not.

    Args:
        q: rotated queries [n, H_q, d], n at least 1.
        k: rotated keys [m, H, d].
        whole: tiles that hold one of so many last queries attend to all blocks.

    Returns:
        int32 [H_q, tiles, blocks], ascending, anything past their number; and int32 [H_q, tiles], their number.
    """
    n, query_heads, dim = q.shape
    m, heads = k.shape[:2]
    tiles, blocks = -(-n // BLOCK), -(-m // BLOCK)
    indices = torch.zeros(query_heads, tiles, blocks, dtype=torch.int32, device=q.device)
    counts = torch.zeros(query_heads, tiles, dtype=torch.int32, device=q.device)
    offsets = torch.arange(1, SAMPLED + 1, device=q.device) * (BLOCK // SAMPLED) - 1
    for tile in range(tiles):
        first = m - n + tile * BLOCK
        end = (min(first + BLOCK, m) - 1) // BLOCK + 1
        free = range(SINK_BLOCKS, max(SINK_BLOCKS, first // BLOCK - LOCAL_BLOCKS + 1))
        chosen = torch.ones(query_heads, end, dtype=torch.bool, device=q.device)
        if len(free) and (tile + 1) * BLOCK <= n - whole:
            sampled = q[(tile * BLOCK + offsets).clamp(max=n - 1)].float().unflatten(1, (heads, -1))
            keys = k[free.start * BLOCK : free.stop * BLOCK].float()
            scores = torch.einsum("rhgd,mhd->hgrm", sampled, keys).flatten(0, 1) * dim**-0.5
            sums = scores.unflatten(-1, (-1, BLOCK)).logsumexp(-1)  # [H_q, sampled, free]
            shares = (sums - sums.logsumexp(-1, keepdim=True)).amax(1)
            for head in range(query_heads):
                least, kept = math.log(share), shares[head] >= math.log(share)
                while int(kept.sum()) > int(most * end):
                    least += math.log(2)
                    kept = shares[head] >= least
                chosen[head, free.start : free.stop] = kept
        for head in range(query_heads):
            found = chosen[head].nonzero().flatten()
            indices[head, tile, : len(found)] = found
            counts[head, tile] = len(found)
    return indices, counts
