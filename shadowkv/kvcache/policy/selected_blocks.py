"""Chooses the blocks of tokens that a query attends to, as a model's indexer does (``shape.Indexer``). Decode steps and
prompts use these functions.

Shapes: N blocks, n tokens, H heads, d dimensions of an index key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from shadowkv.kvcache.policy.shape import Indexer


def selected_blocks(scores: Tensor, positions: Tensor, indexer: Indexer) -> Tensor:
    """Chooses the blocks that queries attend to.

    Args:
        scores: float32 [..., H, N], for each of N blocks the largest product of the index query with one of the block's
            index keys; -inf for blocks that begin after the query.
        positions: int64 [...], positions of the queries.

    Returns:
        bool [..., H, N].
    """
    own = positions.unsqueeze(-1) // indexer.block_size
    local = (own - torch.arange(indexer.local_blocks, device=own.device)).clamp(min=0)
    local = local.unsqueeze(-2).expand(*scores.shape[:-1], -1)
    best = scores.scatter(-1, local, float("inf")).topk(min(indexer.topk_blocks, scores.shape[-1]), dim=-1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > float("-inf"))


def largest_of_blocks(scores: Tensor, size: int) -> Tensor:
    """Returns the largest score of every block of ``size`` tokens, [..., ceil(n / size)], from ``scores`` [..., n]."""
    return pad(scores, (0, -scores.shape[-1] % size), value=float("-inf")).unflatten(-1, (-1, size)).amax(-1)


def selected_complete_blocks(scores: Tensor, positions: Tensor, indexer: Indexer) -> Tensor:
    """Returns bool [..., N]: the complete blocks that queries at ``positions`` int64 [...] attend to, chosen by the
    blocks' scores [..., N]. Blocks that do not exist have the score -inf."""
    complete = torch.arange(1, scores.shape[-1] + 1, device=scores.device) * indexer.block_size
    scores = scores.masked_fill(complete > positions.unsqueeze(-1) + 1, float("-inf"))
    best = scores.topk(min(indexer.topk_blocks, scores.shape[-1]), dim=-1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > float("-inf"))
