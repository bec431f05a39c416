"""Checks the blocks that ``select_blocks`` samples, by shares in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shadowkv.ops.select_blocks.reference import BLOCK, FACTORS, HALVINGS, LOCAL_BLOCKS, SINK_BLOCKS, Blocks


def check_draws(
    q: Tensor, k: Tensor, blocks: Blocks, sampled: Tensor, error: float, whole: int, least: int, close: float
) -> int:
    """Checks that lists ascend and have the blocks that are always attended to, and that weights follow from the
    smallest sufficient factor of the probabilities.

    Args:
        blocks: indices, counts and weights.
        sampled: int32 [H_q, tiles, sampled].
        least: minimum expected number of sampled blocks.
        close: relative error of a share.

    Returns:
        The number of blocks that were left out, of tiles that may leave out some.
    """
    indices, counts, weights = (x.cpu() for x in blocks)
    (n, heads, _), m, unlisted = q.shape, len(k), 0
    for head, tile in torch.cartesian_prod(torch.arange(heads), torch.arange(-(-n // BLOCK))).tolist():
        seen = (min(m, m - n + (tile + 1) * BLOCK) - 1) // BLOCK + 1
        end = max(SINK_BLOCKS, (m - n + tile * BLOCK) // BLOCK - LOCAL_BLOCKS + 1)
        listed, weight = indices[head, tile, : counts[head, tile]].long(), weights[head, tile, : counts[head, tile]]
        assert (listed.diff() > 0).all()
        assert listed[-1] < seen
        chosen, stands_for = torch.zeros(seen, dtype=torch.bool), torch.ones(seen, dtype=torch.float64)
        chosen[listed], stands_for[listed] = True, weight.double()
        if not error or n - whole < (tile + 1) * BLOCK or end == SINK_BLOCKS:
            assert chosen.all() and (weight == 1).all()
            continue
        free = slice(SINK_BLOCKS, end)
        always = torch.ones(seen, dtype=torch.bool)
        always[free] = False
        assert chosen[always].all() and (stands_for[always] == 1).all()
        shares = free_shares(q, k, sampled[head, tile].tolist(), head, end)
        largest, drawn = shares.amax(0), chosen[free] & (stands_for[free] > 1)
        unlisted += int((~chosen[free]).sum())
        if not drawn.any():
            assert chosen[free].all() or chosen[free].sum() >= least
            continue
        factors = 1 / (stands_for[free] * largest)[drawn]
        factor = factors.median()
        torch.testing.assert_close(factors, factor.expand_as(factors), rtol=close, atol=0)
        assert chosen[free][largest * factor > 1 + close].all()
        step = 2 ** (FACTORS / 2**HALVINGS)
        assert enough(shares, factor * (1 + close), error * (1 + close), least)
        assert not enough(shares, factor / step * (1 - close), error * (1 - close), least)
        tail = (largest * factor).clamp(max=1)[~(chosen[free] & (stands_for[free] == 1))].sum()
        assert abs(drawn.sum() - tail) <= 1 + close * seen
    return unlisted


def free_shares(q: Tensor, k: Tensor, rows: list[int], head: int, end: int) -> Tensor:
    """Shares [sampled, free] of the blocks that a tile may leave out, in the softmax of its sampled queries."""
    n, m, shared = len(q), len(k), head * k.shape[1] // q.shape[1]
    scores = q[rows, head].double() @ k[:, shared].double().T / math.sqrt(q.shape[2])
    later = torch.arange(m, device=q.device) > m - n + torch.tensor(rows, device=q.device)[:, None]
    shares = scores.masked_fill(later, -math.inf).softmax(1)[:, SINK_BLOCKS * BLOCK : end * BLOCK]
    return shares.unflatten(1, (-1, BLOCK)).sum(2).cpu()


def enough(shares: Tensor, factor: Tensor, error: float, least: int) -> bool:
    """Whether blocks drawn with probabilities in proportion to their largest share represent every sampled query."""
    probability = (shares.amax(0) * factor).clamp(max=1)
    variance = (shares.square() * (1 / probability - 1)).sum(1).max()
    return bool(variance <= error**2 and probability.sum() >= min(least, shares.shape[1]) - 2e-3)
