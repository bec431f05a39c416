"""Prefill: new tokens of sequences, layer by layer and block by block, into one cache or into several at once."""

from __future__ import annotations

from collections.abc import Generator
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.fan_out import FanOut
from shadowkv.kvcache.prefill_batch import PrefillBlock
from shadowkv.kvcache.upload import upload
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.models.decoder import Decoder

BLOCK_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens that go through a layer together; a prefill can be paused between blocks."""


def pieces(layers: int, tokens: int, device: torch.device, scored: bool) -> int:
    """Number of pieces of a prefill of ``tokens`` tokens, between which it may be paused."""
    blocks = -(-tokens // BLOCK_TOKENS[device.type])
    return layers * blocks if scored else (layers - 1) * blocks + 1


def prefill(
    model: Decoder, cache: KVCache | FanOut, work: list[tuple[Any, list[int]]], scored: bool = False
) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
    """Computes new tokens of admitted sequences; returns float32 logits [n, V] of each one's last and, for ``scored``
    ones, the final hidden states [tokens, D] of each one.

    In the last layer only keys, values and what follows from a sequence's last token are needed where the other states
    are not requested: only those are computed further.

    Yields wherever it may be paused for a decode step, or closed; the sequences of a closed prefill can only be
    released.

    Args:
        work: sequences of the cache, or tuples of one per cache where there are several, and their new tokens.
    """
    batch = cache.prefill_batch([(sequence, len(tokens)) for sequence, tokens in work])
    size, layers = BLOCK_TOKENS[cache.device.type], cast("list[DecoderLayer]", list(model.layers))
    blocks = [batch.block(start, min(start + size, batch.num_tokens)) for start in range(0, batch.num_tokens, size)]
    tokens = np.fromiter(chain.from_iterable(tokens for _, tokens in work), np.int64, batch.num_tokens)
    # By block: the residual stream, and what the previous layer adds to it.
    x = list(model.embed(upload(torch.from_numpy(tokens), cache.device)).split(size))
    added: list[Tensor | None] = [None] * len(blocks)
    last = batch.starts[1:].long() - 1
    seen = cast(Any, cache)  # for attention layers
    try:
        for number, layer in enumerate(layers):
            ends = number + 1 == len(layers) and not scored
            if len(blocks) == 1:
                x[0], added[0] = layer(x[0], added[0], seen, blocks[0], last if ends else None)
                yield
            else:
                normed = []
                for i, block in enumerate(blocks):
                    x[i], one = layer.normalise(x[i], added[i])
                    added[i] = None
                    layer.append(one, seen, block)
                    normed.append(one)
                if ends:
                    newest = batch.newest()
                    parts = [layer.attend(_rows(x, one), _rows(normed, one), seen, one) for one in newest]
                    x, added = [part[-1:] for part, _ in parts], [part[-1:] for _, part in parts]
                    yield
                else:
                    for i, block in enumerate(blocks):
                        x[i], added[i] = layer.attend(x[i], normed.pop(0), seen, block)
                        yield
            cache.finish_prefill(number, batch)
    finally:
        cache.leave_prefill()
    cache.end_prefill(batch)
    hidden = torch.cat([part if more is None else part + more for part, more in zip(x, added, strict=True)])
    if not scored:
        return model.logits(hidden), []
    return model.logits(hidden[last]), [hidden[one.start : one.stop] for one in batch.new]


def _rows(parts: list[Tensor], block: PrefillBlock) -> Tensor:
    """The rows [n, D] of a block's tokens, from ``parts``, which split all tokens equally."""
    size = len(parts[0])
    of = range(block.start // size, -(-block.stop // size))
    return torch.cat([parts[i][max(block.start - i * size, 0) : block.stop - i * size] for i in of])
