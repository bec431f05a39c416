"""Which blocks of tokens a query attends to, by the rule of a model's indexer (``shape.Indexer``). Steps and prompts
use it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from shadowkv.kvcache.policy.shape import Indexer


def selected_blocks(scores: Tensor, positions: Tensor, indexer: Indexer) -> Tensor:
    """Chooses the blocks that queries attend to.

    Args:
        scores: float32 [..., H, N], the largest product with an index key in each of N blocks; -inf for blocks that
            begin after the query.
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
    """The largest of every ``size`` neighbours of ``scores`` [..., n]: [..., ceil(n / size)]."""
    return pad(scores, (0, -scores.shape[-1] % size), value=float("-inf")).unflatten(-1, (-1, size)).amax(-1)


def block_scores(queries: Tensor, blocks: Tensor) -> Tensor:
    """Scores, float32 [..., N], of index queries [..., H, d] with keys of blocks [..., N, d]."""
    return (queries.float() @ blocks.float().mT).relu_().sum(-2)


def selected_complete_blocks(scores: Tensor, positions: Tensor, indexer: Indexer) -> Tensor:
    """Chooses complete blocks for queries at ``positions`` int64 [...], bool [..., N], by scores [..., N] of all
    blocks. Blocks that do not exist have the score -inf."""
    complete = torch.arange(1, scores.shape[-1] + 1, device=scores.device) * indexer.block_size
    scores = scores.masked_fill(complete > positions.unsqueeze(-1) + 1, float("-inf"))
    best = scores.topk(min(indexer.topk_blocks, scores.shape[-1]), dim=-1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > float("-inf"))
