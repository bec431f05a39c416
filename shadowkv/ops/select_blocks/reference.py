"""Selection of blocks by a few sampled queries per tile, in PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Blocks = tuple[Tensor, Tensor, Tensor]
"""Indices of blocks, int32 [H_q, tiles, blocks]; how many of them are valid, int32 [H_q, tiles]; and their weights,
float32 [H_q, tiles, blocks]."""

BLOCK = 128
"""Number of keys in a block, and of queries in a tile."""

SAMPLED, SPREAD = 8, 4
"""Number of sampled queries per tile, and how many of them are evenly spaced. The attention of the sampled queries
decides how the tile's blocks are sampled."""

SINK_BLOCKS, LOCAL_BLOCKS = 2, 4
"""Numbers of blocks that a tile always attends to: the first blocks, and the last blocks up to and including the block
of the tile's first position."""

MIN_BLOCKS = 16
"""Minimum expected number of blocks that a tile samples. Without it, heads that attend mostly to the first tokens would
sample no block or a single one."""

FACTORS, HALVINGS = 40, 10
"""The factor that turns shares into probabilities is searched from 1 to 2^``FACTORS``. The range of its log2 is halved
``HALVINGS`` times."""


def select_blocks(q: Tensor, k: Tensor, error: float, whole: int = 0, seed: int = 0) -> Blocks:
    """Selects the blocks of keys that each tile of queries attends to. The queries have the last n of m positions.

    A tile always attends to the first blocks (``SINK_BLOCKS``), to the blocks just before its own (``LOCAL_BLOCKS``)
    and to its own blocks. The other blocks hold only earlier keys, and are sampled. For each of the tile's sampled
    queries (``sample_queries``), a block has a share of the softmax over all keys that the query sees. The block's
    probability is a factor times its largest share, at most 1. If it is selected, it stands for 1 / probability blocks,
    so that expected sums are exact (Horvitz and Thompson 1952). Sampling is systematic (Madow 1949).

    The factor is the smallest that meets two conditions. For every sampled query, the sampled sum of softmax weights
    has a standard deviation of at most ``error`` times the whole sum, computed as if blocks were sampled independently.
    And the expected number of sampled blocks is at least ``MIN_BLOCKS``, if that many blocks have a share of at least
    2^-``FACTORS``. So a tile needs more blocks if attention is spread out, but hardly more in longer prompts.

    Args:
        q: queries [n, H_q, d] of one sequence, after RoPE, n at least 1.
        k: keys [m, H, d] of all its positions, after RoPE.
        error: largest standard deviation, from 0 to below 1. With 0 all blocks are selected.
        whole: all blocks are selected for tiles with one of the last ``whole`` queries, and for a last tile that is not
            full.
        seed: seed of the random numbers. The samples do not depend on how a prompt is divided into calls, if each call
            starts at a multiple of 128.

    Returns:
        ``Blocks``: ascending indices, arbitrary from their count on; counts; and weights, the number of blocks that
        each block stands for, at least 1.
    """
    n, query_heads, dim = q.shape
    m, heads = k.shape[:2]
    tiles, blocks = -(-n // BLOCK), -(-m // BLOCK)
    indices = torch.zeros(query_heads, tiles, blocks, dtype=torch.int32, device=q.device)
    counts = torch.zeros(query_heads, tiles, dtype=torch.int32, device=q.device)
    weights = torch.ones(query_heads, tiles, blocks, device=q.device)
    sampled, whole = sample_queries(q).long(), whole if error else n
    for tile in range(tiles):
        first = m - n + tile * BLOCK
        end = (min(first + BLOCK, m) - 1) // BLOCK + 1
        free = slice(SINK_BLOCKS, max(SINK_BLOCKS, first // BLOCK - LOCAL_BLOCKS + 1))
        probability = torch.ones(query_heads, end, device=q.device)
        drawn = torch.ones(query_heads, end, dtype=torch.bool, device=q.device)
        if free.start < free.stop and (tile + 1) * BLOCK <= n - whole:
            rows = sampled[:, tile]  # [H_q, sampled]
            queries = q.transpose(0, 1).gather(1, rows[..., None].expand(-1, -1, dim)).float().unflatten(0, (heads, -1))
            scores = torch.einsum("hgrd,mhd->hgrm", queries, k[: end * BLOCK].float()).flatten(0, 1) * dim**-0.5
            later = torch.arange(scores.shape[2], device=q.device) > m - n + rows[..., None]
            shares = scores.masked_fill(later, -math.inf).softmax(-1)[..., free.start * BLOCK : free.stop * BLOCK]
            probability[:, free] = probabilities(shares.unflatten(-1, (-1, BLOCK)).sum(-1), error)
            drawn[:, free] = systematic(probability[:, free], offsets(seed, query_heads, first, q.device))
        for head in range(query_heads):
            listed = drawn[head].nonzero().flatten()
            indices[head, tile, : len(listed)] = listed
            weights[head, tile, : len(listed)] = 1 / probability[head, listed]
            counts[head, tile] = len(listed)
    return indices, counts, weights


def probabilities(shares: Tensor, error: float) -> Tensor:
    """Returns the probabilities of blocks, float32 [H_q, blocks], from their shares [H_q, sampled, blocks]."""
    largest, count = shares.amax(1), shares.shape[2]
    least = torch.zeros(len(shares), 1, device=shares.device)
    most = torch.full_like(least, FACTORS)
    for _ in range(HALVINGS):
        factor = (least + most) / 2
        probability = (largest * factor.exp2()).clamp(max=1)
        missed = torch.where(largest > 0, 1 / probability - 1, 0)  # a sample's variance, in units of its squared share
        variance = (shares.square() * missed[:, None]).sum(-1).amax(1, keepdim=True)
        enough = (variance <= error**2) & (probability.sum(-1, keepdim=True) >= min(MIN_BLOCKS, count) - 1e-3)
        least, most = torch.where(enough, least, factor), torch.where(enough, factor, most)
    return (largest * most.exp2()).clamp(max=1)


def systematic(probability: Tensor, offset: Tensor) -> Tensor:
    """Returns a systematic sample of blocks, bool [H_q, blocks].

    A running sum starts with ``offset``, int64 [H_q, 1] in units of 2^-32, and adds each block's probability. A block
    is selected if its probability makes the sum pass a whole number. Blocks of probability 1 are always selected, and
    are not added to the sum.
    """
    part = torch.where(probability < 1, probability * 2**32, 0).long()
    total = part.cumsum(-1) + offset
    return (probability >= 1) | (total >> 32 != total - part >> 32)


def offsets(seed: int, query_heads: int, position: int, device: torch.device) -> Tensor:
    """Returns 32-bit random numbers, int64 [H_q, 1], for the tile that starts at ``position`` (MurmurHash3's
    finaliser)."""
    head = torch.arange(query_heads, device=device)
    x = (seed * 0x9E3779B1 + head * 0x85EBCA77 + position * 0xC2B2AE3D) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return (x ^ x >> 16)[:, None]


def sample_queries(q: Tensor) -> Tensor:
    """Chooses the rows of ``q`` [n, H_q, d] that represent each tile, int32 [H_q, tiles, ``SAMPLED``].

    The first ``SPREAD`` rows are evenly spaced and end with the tile's last query. They are typical of the tile's
    queries. Each further row is the query farthest from those already chosen (Gonzalez 1985). Such rows include queries
    that are unlike the others.
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
