"""Prefill: new tokens of sequences, layer by layer and block by block, into one cache or into several at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor

from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.fan_out import FanOut
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.models.decoder import Decoder

BLOCK_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens that go through a layer together; a prefill can be paused between blocks."""


def prefill(
    model: Decoder, cache: KVCache | FanOut, work: list[tuple[Any, list[int]]]
) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
    """Computes new tokens of admitted sequences; returns float32 logits [n, V] of each one's last, and the final hidden
    states [tokens, D] of each one.

    Yields wherever it may be paused for a decode step, or closed for good; the sequences of a closed prefill can only
    be released.

    Args:
        work: sequences of the cache, or tuples of one of each where there are several, and their new tokens.
    """
    batch = cache.prefill_batch([(sequence, len(tokens)) for sequence, tokens in work])
    hidden = model.embed(torch.tensor([token for _, tokens in work for token in tokens], device=cache.device))
    size = BLOCK_TOKENS[cache.device.type]
    blocks = [batch.block(start, min(start + size, batch.num_tokens)) for start in range(0, batch.num_tokens, size)]
    seen = cast(Any, cache)  # by attention layers
    try:
        for number, layer in enumerate(cast("list[DecoderLayer]", list(model.layers))):
            if len(blocks) == 1:
                hidden = torch.add(*layer(hidden, None, seen, blocks[0]))
                yield
            else:
                for block in blocks:
                    layer.append(hidden[block.start : block.stop], seen, block)
                for block in blocks:
                    layer.attend(hidden[block.start : block.stop], seen, block)
                    yield
            cache.finish_prefill(number, batch)
    finally:
        cache.leave_prefill()
    cache.end_prefill(batch)
    states = [hidden[one.start : one.stop] for one in batch.new]
    return model.logits(torch.stack([state[-1] for state in states])), states
