"""Blocks of keys for sparse prefills of models that have none to choose: random weights attend to everything alike."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.sparse_prefill import BlockHook
from shadowkv.ops.select_blocks.reference import LOCAL_BLOCKS, SINK_BLOCKS


def replayed(density: float, seed: int = 0) -> BlockHook:
    """A hook that gives tiles the blocks that they always attend to and random others for each head, together a share
    ``density`` of all. What it replaces has been computed."""
    found: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def hook(layer: int, q: Tensor, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        if tuple(indices.shape) not in found:
            found[tuple(indices.shape)] = random_blocks(indices, density, seed)
        return found[tuple(indices.shape)]

    return hook


def random_blocks(like: Tensor, density: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices int32 [H_q, tiles, blocks] as ``like``, the last tile of which ends with the last block, and counts [H_q,
    tiles]."""
    heads, tiles, blocks = like.shape
    generator = torch.Generator(like.device).manual_seed(seed)
    indices, counts = torch.zeros_like(like), like.new_zeros(heads, tiles)
    for tile in range(tiles):
        end = blocks - tiles + tile + 1
        order = torch.rand(heads, end, generator=generator, device=like.device)
        order[:, :SINK_BLOCKS] = order[:, max(0, end - 1 - LOCAL_BLOCKS) :] = 2
        count = min(end, max(SINK_BLOCKS + LOCAL_BLOCKS + 1, round(density * end)))
        indices[:, tile, :count] = order.topk(count).indices.sort().values.int()
        counts[:, tile] = count
    return indices, counts
