"""How much of its exact attention a sparse prefill leaves out, tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.select_blocks.reference import BLOCK

ROWS = 1024
"""Queries of a head whose exact softmax is computed at once: whole tiles."""


def left_out(q: Tensor, k: Tensor, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of the softmax over all keys that are in blocks which a tile does not attend to.

    Args:
        q: RoPE-rotated queries [n, H_q, d], the last of m positions.
        k: RoPE-rotated keys [m, H, d].
        indices, counts: as ``select_blocks`` returns them.

    Returns:
        Of tiles that are full and do not attend to everything, of all heads together: the mean over a tile's queries,
        and the largest, float32 [tiles].
    """
    (n, query_heads, dim), (m, heads) = q.shape, k.shape[:2]
    blocks, none = indices.shape[2], q.new_empty(0, dtype=torch.float32)
    means, largest = [none], [none]
    position = torch.arange(blocks * BLOCK, device=q.device)
    keys = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, blocks * BLOCK - m))
    for head in range(query_heads):
        for start in range(0, n // BLOCK * BLOCK, ROWS):
            rows = q[start : min(start + ROWS, n // BLOCK * BLOCK), head]
            tiles = slice(start // BLOCK, start // BLOCK + len(rows) // BLOCK)
            scores = (rows @ keys[:, head * heads // query_heads].T).float() * dim**-0.5
            own = torch.arange(m - n + start, m - n + start + len(rows), device=q.device)
            shares = scores.masked_fill_(position > own[:, None], float("-inf")).softmax(1)
            of_blocks = shares.unflatten(1, (blocks, BLOCK)).sum(2).unflatten(0, (-1, BLOCK))  # [tiles, rows, blocks]
            listed = torch.arange(blocks, device=q.device) < counts[head, tiles, None]
            kept = torch.zeros_like(listed).scatter_(1, indices[head, tiles].long() * listed, listed)
            kept[:, 0] = True  # unlisted places were written there
            gone = (of_blocks * ~kept[:, None]).sum(2)
            choosing = counts[head, tiles] < own[BLOCK - 1 :: BLOCK] // BLOCK + 1
            means.append(gone.mean(1)[choosing])
            largest.append(gone.amax(1)[choosing])
    return torch.cat(means), torch.cat(largest)
