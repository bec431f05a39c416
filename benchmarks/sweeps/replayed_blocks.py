"""Blocks of keys for sparse prefills of models that cannot choose any: random weights attend to everything equally."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.kvcache.sequence import CachedSequence
from shadowkv.kvcache.sparse_prefill import BlockHook
from shadowkv.ops.select_blocks.reference import LOCAL_BLOCKS, SINK_BLOCKS, Blocks


def replayed(density: float, seed: int = 0) -> BlockHook:
    """A hook that gives tiles the blocks that they always attend to and random others for each head, in total a share
    ``density`` of all. The selection that it replaces is still computed."""
    known: dict[tuple[int, ...], Blocks] = {}

    def hook(layer: int, q: Tensor, k: Tensor, blocks: Blocks) -> Blocks:
        shape = tuple(blocks[0].shape)
        if shape not in known:
            known[shape] = random_blocks(blocks[0], density, seed)
        return known[shape]

    return hook


def replay(runner: Runner, sequences: list[CachedSequence], density: float | None) -> None:
    """Gives sparse prefills their blocks from now on, or lets them choose, on all ranks (``Runner.collective_rpc``)."""
    runner.cache.block_hook = None if density is None else replayed(density)


def random_blocks(like: Tensor, density: float, seed: int) -> Blocks:
    """Indices int32 [H_q, tiles, n] for ``like`` int32 [H_q, tiles, blocks], whose last tile ends with the last block,
    counts [H_q, tiles], of which n is the largest, and weights [H_q, tiles, n], 2 where a block was random.

    Lists of all blocks for every block of a prompt of a million tokens would take gigabytes."""
    heads, tiles, blocks = like.shape
    end = blocks - tiles + 1 + torch.arange(tiles)[:, None]
    count = (density * end.double()).round().clamp_min(SINK_BLOCKS + LOCAL_BLOCKS + 1).minimum(end).int()
    longest, generator = int(count.max()), torch.Generator(like.device).manual_seed(seed)
    end, count = end.to(like.device), count.to(like.device)
    place, within = torch.arange(blocks, device=like.device), torch.arange(longest, device=like.device)
    found = []
    for _ in range(heads):  # one by one, as sorting takes several times the memory of what is sorted
        order = torch.rand(tiles, blocks, generator=generator, device=like.device)
        order.masked_fill_((place < SINK_BLOCKS) | (place >= end - 1 - LOCAL_BLOCKS), 2).masked_fill_(place >= end, -1)
        chosen = order.topk(longest).indices.masked_fill_(within >= count, blocks).sort().values
        found.append(chosen.masked_fill_(chosen == blocks, 0).int())
    indices, counts = torch.stack(found), count.squeeze(1).expand(heads, tiles).contiguous()
    always = (indices < SINK_BLOCKS) | (indices >= end - 1 - LOCAL_BLOCKS)
    return indices, counts, torch.where(always, 1.0, 2.0)
