"""Prefill: new tokens of sequences, layer by layer and block by block, into one cache or into several at once; or those
of short prompts in one pass with a decode step."""

from __future__ import annotations

from collections.abc import Generator
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.cache import FanOut, KVCache
from shadowkv.kvcache.decode.batch import DecodeBatch
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.mixed_batch import MixedBatch
from shadowkv.kvcache.prefill.batch import PrefillBatch, PrefillBlock
from shadowkv.kvcache.sequences.sequence import CachedSequence
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
    batch, ids, last = _packed(cache, work)
    size, layers = BLOCK_TOKENS[cache.device.type], cast("list[DecoderLayer]", list(model.layers))
    try:
        if batch.num_tokens <= size:
            block = batch.block(0, batch.num_tokens)
            hidden = yield from _in_one_block(model.embed(ids), layers, cache, batch, block, None if scored else last)
        else:
            x = torch.empty(batch.num_tokens, model.config.hidden_size, dtype=model.dtype, device=cache.device)
            for part, part_ids in zip(x.split(size), ids.split(size), strict=True):
                part.copy_(model.embed(part_ids))
            hidden = yield from _in_blocks(x, layers, cache, batch, scored)
    finally:
        cache.leave_prefill()
    cache.end_prefill(batch)
    if not scored:
        return model.logits(hidden), []
    return model.logits(hidden[last]), [hidden[block.start : block.stop] for block in batch.new]


def mixed_pass(
    model: Decoder, cache: KVCache, step: DecodeBatch, step_ids: Tensor, work: list[tuple[CachedSequence, list[int]]]
) -> Tensor:
    """Computes new tokens of admitted sequences, at most a block, in one pass with a decode step of others: weights are
    read once, and those who decode wait for one pass instead of two.

    Args:
        step: the decode step; what is due before it has been sealed.
        step_ids: int64 [B], its tokens.
        work: as of ``prefill``.

    Returns:
        float32 logits [B + n, V]: the step's, and those of each new sequence's last token.
    """
    batch, ids, last = _packed(cache, work)
    layers, count = cast("list[DecoderLayer]", list(model.layers)), len(step_ids)
    rows = torch.cat((torch.arange(count, device=cache.device), last + count))
    try:
        block = MixedBatch(step, batch.block(0, batch.num_tokens))
        passing = _in_one_block(model.embed(torch.cat((step_ids, ids))), layers, cache, batch, block, rows)
        try:
            while True:
                next(passing)
        except StopIteration as end:
            hidden: Tensor = end.value
    finally:
        cache.leave_prefill()
    cache.end_prefill(batch)
    return model.logits(hidden)


def _packed(cache: KVCache | FanOut, work: list[tuple[Any, list[int]]]) -> tuple[PrefillBatch, Tensor, Tensor]:
    """The batch of new tokens, their ids int64 [T], and each sequence's last row int64 [n]."""
    batch = cache.prefill_batch([(sequence, len(tokens)) for sequence, tokens in work])
    tokens = np.fromiter(chain.from_iterable(tokens for _, tokens in work), np.int64, batch.num_tokens)
    return batch, upload(torch.from_numpy(tokens), cache.device), batch.starts[1:].long() - 1


def _in_one_block(
    x: Tensor,
    layers: list[DecoderLayer],
    cache: Any,
    batch: PrefillBatch,
    block: PrefillBlock | MixedBatch,
    rows: Tensor | None,
) -> Generator[None, None, Tensor]:
    """Takes the residual stream [T, D] of ``block``, which has all of ``batch``, through all layers, and returns it
    with what the last one adds: for the rows ``rows`` int64 [n] only, if these are given."""
    added: Tensor | None = None
    for number, layer in enumerate(layers):
        x, added = layer(x, added, cache, block, rows if number + 1 == len(layers) else None)
        yield
        cache.finish_prefill(number, batch)
    return x if added is None else x + added


def _in_blocks(
    x: Tensor, layers: list[DecoderLayer], cache: Any, batch: PrefillBatch, scored: bool
) -> Generator[None, None, Tensor]:
    """The same, block by block and in place: of a long prompt nothing but its residual stream, keys and values is kept.
    Only each sequence's last row is returned if they are not ``scored``.

    A block is normalised twice, for its keys and values and for its queries: normalised states of all blocks, or what
    their last layer adds, would take as much memory as the stream.
    """
    size, tokens = BLOCK_TOKENS[cache.device.type], batch.num_tokens
    blocks, parts = [batch.block(at, min(at + size, tokens)) for at in range(0, tokens, size)], x.split(size)
    for number, layer in enumerate(layers):
        for part, block in zip(parts, blocks, strict=True):
            layer.append(layer.normalise(part, None)[1], cache, block)
        if number + 1 == len(layers) and not scored:
            newest = batch.newest()
            hidden = torch.cat([_attended(layer, x[block.start : block.stop], cache, block)[-1:] for block in newest])
            yield
            cache.finish_prefill(number, batch)
            return hidden
        for part, block in zip(parts, blocks, strict=True):
            _attended(layer, part, cache, block, out=part)
            yield
        cache.finish_prefill(number, batch)
    return x


def _attended(layer: DecoderLayer, x: Tensor, cache: Any, block: PrefillBlock, out: Tensor | None = None) -> Tensor:
    """The residual stream [n, D] of a block behind a layer whose keys and values are all in the cache."""
    normed = layer.normalise(x, None)[1]
    return torch.add(*layer.attend(x, normed, cache, block), out=out)
