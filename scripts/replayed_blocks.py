"""Blocks of keys for sparse prefills of models that cannot choose any: random weights attend to everything equally."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.engine.runner import Runner
from shadowkv.kvcache.sequence import CachedSequence
from shadowkv.kvcache.sparse_prefill import BlockHook
from shadowkv.ops.select_blocks.reference import LOCAL_BLOCKS, SINK_BLOCKS


def replayed(density: float, seed: int = 0) -> BlockHook:
    """A hook that gives tiles the blocks that they always attend to and random others for each head, in total a share
    ``density`` of all. The selection that it replaces is still computed."""
    found: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def hook(layer: int, q: Tensor, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        if tuple(indices.shape) not in found:
            found[tuple(indices.shape)] = random_blocks(indices, density, seed)
        return found[tuple(indices.shape)]

    return hook


def replay(runner: Runner, sequences: list[CachedSequence], density: float | None) -> None:
    """Gives sparse prefills their blocks from now on, or lets them choose, on all ranks (``Runner.collective_rpc``)."""
    runner.cache.block_hook = None if density is None else replayed(density)


def random_blocks(like: Tensor, density: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices int32 [H_q, tiles, blocks] like ``like``, whose last tile ends with the last block, and counts [H_q,
    tiles]."""
    heads, tiles, blocks = like.shape
    generator = torch.Generator(like.device).manual_seed(seed)
    place = torch.arange(blocks, device=like.device)
    end = blocks - tiles + 1 + torch.arange(tiles, device=like.device)[:, None]
    count = (density * end.double()).round().clamp_min(SINK_BLOCKS + LOCAL_BLOCKS + 1).minimum(end).long()
    order = torch.rand(heads, tiles, blocks, generator=generator, device=like.device)
    order.masked_fill_((place < SINK_BLOCKS) | (place >= end - 1 - LOCAL_BLOCKS), 2).masked_fill_(place >= end, -1)
    ranks = order.argsort(descending=True)
    chosen = ranks.masked_fill(place >= count, blocks).sort().values
    return chosen.masked_fill(chosen == blocks, 0).int(), count.squeeze(1).int().expand(heads, tiles).contiguous()
