"""Selection of blocks by a few sampled queries of each tile, in PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Keys of a block and queries of a tile."""

SAMPLED = 8
"""Queries of a tile whose attention is computed to choose its blocks."""

SINK_BLOCKS, LOCAL_BLOCKS = 2, 4
"""First blocks, and those before a tile's own, that it always attends to."""


WIDTH = 128
"""Codes of a key lie in rows of a multiple of so many bytes."""


@dataclass(frozen=True)
class KeyBlocks:
    """Whole blocks of RoPE-rotated keys, in 127ths of the largest entry of a block and head (``code_key_blocks``).

    Attributes:
        codes: int8 [m, H, w], of which the first d are a key's; m is a multiple of ``BLOCK`` and w of ``WIDTH``.
        steps: float32 [m / BLOCK, H], what a code of 1 stands for.
    """

    codes: Tensor
    steps: Tensor

    @staticmethod
    def bytes_per_token(heads: int, dim: int) -> int:
        """Of the codes."""
        return heads * -(-dim // WIDTH) * WIDTH

    @classmethod
    def empty(cls, blocks: int, heads: int, dim: int, device: torch.device) -> KeyBlocks:
        """Room for so many."""
        codes = torch.empty(blocks * BLOCK, heads, -(-dim // WIDTH) * WIDTH, dtype=torch.int8, device=device)
        return cls(codes, torch.empty(blocks, heads, dtype=torch.float32, device=device))


def in_steps(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes int8 of ``x`` [...] in 127ths of the largest entry along ``axes``, and these steps, float32 [...] of which
    those axes are 1."""
    largest = x.abs().amax(axes, keepdim=True).clamp(min=1e-30)
    return (x * (127 / largest) + 0.5).floor().clamp(-127, 127).to(torch.int8), largest / 127


def select_blocks(
    q: Tensor, keys: KeyBlocks, m: int, share: float, most: float, whole: int = 0
) -> tuple[Tensor, Tensor]:
    """The blocks of keys that each tile of the last n of m positions attends to.

    A tile always attends to the first blocks, to the newest ones and to its own (``SINK_BLOCKS``, ``LOCAL_BLOCKS``).
    Of all others, which hold nothing but keys before it, it takes those that have at least ``share`` of the softmax of
    one of its sampled queries (``sample_queries``) over all these. Where that is more than ``most`` of all blocks that
    it may attend to, ``share`` is doubled until it is not. Products are of codes: of keys by blocks, of sampled queries
    by rows, in 127ths of the largest entry.

    Args:
        q: RoPE-rotated queries [n, H_q, d], n at least 1.
        keys: those of the m positions, those of whole blocks before the last tile's newest ones at least.
        whole: tiles that hold one of so many last queries, and a last one that is not full, attend to all blocks.

    Returns:
        int32 [H_q, tiles, blocks], ascending, anything past their number; and int32 [H_q, tiles], their number.
    """
    n, query_heads, dim = q.shape
    heads = keys.codes.shape[1]
    tiles, blocks = -(-n // BLOCK), -(-m // BLOCK)
    indices = torch.zeros(query_heads, tiles, blocks, dtype=torch.int32, device=q.device)
    counts = torch.zeros(query_heads, tiles, dtype=torch.int32, device=q.device)
    sampled = sample_queries(q)
    for tile in range(tiles):
        first = m - n + tile * BLOCK
        end = (min(first + BLOCK, m) - 1) // BLOCK + 1
        free = range(SINK_BLOCKS, max(SINK_BLOCKS, first // BLOCK - LOCAL_BLOCKS + 1))
        chosen = torch.ones(query_heads, end, dtype=torch.bool, device=q.device)
        if len(free) and (tile + 1) * BLOCK <= n - whole:
            rows = sampled[:, tile].long()[..., None].expand(-1, -1, dim)
            asked, step = in_steps(q.transpose(0, 1).gather(1, rows).float(), (2,))
            codes = keys.codes[free.start * BLOCK : free.stop * BLOCK, :, :dim].float()
            products = torch.einsum("hgrd,mhd->hgrm", asked.float().unflatten(0, (heads, -1)), codes).flatten(0, 1)
            steps = keys.steps[free.start : free.stop].T.repeat_interleave(query_heads // heads, 0)  # [H_q, free]
            scores = products.unflatten(-1, (-1, BLOCK)) * (step * steps[:, None] * dim**-0.5)[..., None]
            sums = scores.logsumexp(-1)  # [H_q, sampled, free]
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


def sample_queries(q: Tensor) -> Tensor:
    """Rows of ``q`` [n, H_q, d] that speak for the tiles, int32 [H_q, tiles, ``SAMPLED``].

    The last one of a tile, then each time the one that is farthest from those before (Gonzalez 1985): what one token
    alone looks for is seen, which evenly spread ones miss twice as often.
    """
    n, query_heads, _ = q.shape
    tiles = -(-n // BLOCK)
    sampled = torch.empty(query_heads, tiles, SAMPLED, dtype=torch.int32, device=q.device)
    for tile in range(tiles):
        start = tile * BLOCK
        rows = q[start : start + BLOCK].float().transpose(0, 1)
        apart = torch.cdist(rows, rows)  # [H_q, rows, rows]
        newest = torch.full((query_heads,), rows.shape[1] - 1, device=q.device)
        nearest = torch.full(rows.shape[:2], math.inf, device=q.device)
        for number in range(SAMPLED):
            sampled[:, tile, number] = start + newest
            nearest = torch.minimum(nearest, apart[torch.arange(query_heads, device=q.device), newest])
            newest = nearest.argmax(1)
    return sampled
