"""How far what a sparse prefill attends to is from exact attention, tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.select_blocks.reference import BLOCK, Blocks

ROWS = 4096
"""Queries of a head whose exact softmax is computed at once: whole tiles."""


def left_out(q: Tensor, k: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Shares of the softmax over all keys that a tile's blocks do not represent: how far the sum of their shares, each
    times as many blocks as it stands for, is from 1.

    Args:
        q: RoPE-rotated queries [n, H_q, d], the last of m positions.
        k: RoPE-rotated keys [m, H, d].
        blocks: as ``select_blocks`` returns them.

    Returns:
        Of tiles that are full and do not attend to everything, of all heads together: the mean over a tile's queries,
        and the largest, float32 [tiles].
    """
    (n, query_heads, dim), (m, heads) = q.shape, k.shape[:2]
    indices, counts, weights = blocks
    number, none = indices.shape[2], q.new_empty(0, dtype=torch.float32)
    means, largest = [none], [none]
    position = torch.arange(number * BLOCK, device=q.device)
    keys = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, number * BLOCK - m))
    for head in range(query_heads):
        for start in range(0, n // BLOCK * BLOCK, ROWS):
            rows = q[start : min(start + ROWS, n // BLOCK * BLOCK), head]
            tiles = slice(start // BLOCK, start // BLOCK + len(rows) // BLOCK)
            scores = rows.float() @ keys[:, head * heads // query_heads].float().T * dim**-0.5
            own = torch.arange(m - n + start, m - n + start + len(rows), device=q.device)
            shares = scores.masked_fill_(position > own[:, None], float("-inf")).softmax(1)
            of_blocks = shares.unflatten(1, (number, BLOCK)).sum(2).unflatten(0, (-1, BLOCK))  # [tiles, rows, number]
            listed = torch.arange(number, device=q.device) < counts[head, tiles, None]
            stands_for = torch.zeros(listed.shape, device=q.device)
            stands_for.scatter_add_(
                1, indices[head, tiles].long() * listed, weights[head, tiles].masked_fill(~listed, 0)
            )
            gone = ((of_blocks * stands_for[:, None]).sum(2) - 1).abs()
            choosing = counts[head, tiles] < own[BLOCK - 1 :: BLOCK] // BLOCK + 1
            means.append(gone.mean(1)[choosing])
            largest.append(gone.amax(1)[choosing])
    return torch.cat(means), torch.cat(largest)
