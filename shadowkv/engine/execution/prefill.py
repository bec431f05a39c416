"""Prefill: new tokens of sequences, layer by layer and block by block, into one cache or into several at once; or those
of short prompts in one pass with a decode step."""

from __future__ import annotations

from collections.abc import Generator
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.engine.execution.forward import Flow, forward
from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.cache import FanOut, KVCache
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.prefill.batch import PrefillBatch
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.models.decoder import Decoder

BLOCK_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens that go through a layer together; a prefill can be paused between blocks."""


class Step(NamedTuple):
    """A decode step beside prompts: its batch, what is due before it has been sealed, and its tokens int64 [B]."""

    batch: Batch
    ids: Tensor


def pieces(layers: int, tokens: int, device: torch.device) -> int:
    """Number of pieces of a prefill of ``tokens`` tokens, between which it may be paused."""
    return layers * -(-tokens // BLOCK_TOKENS[device.type])


def prefill(
    model: Decoder,
    cache: KVCache | FanOut,
    work: list[tuple[Any, list[int]]],
    scored: bool = False,
    step: Step | None = None,
) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
    """Computes new tokens of admitted sequences; returns float32 logits [n, V] of each one's last and, for ``scored``
    ones, the final hidden states [tokens, D] of each one.

    In the last layer only keys, values and what follows from a sequence's last token are needed where the other states
    are not requested: only those are computed further.

    Yields wherever it may be paused for a decode step, or closed; the sequences of a closed prefill can only be
    released.

    Args:
        work: sequences of the cache, or tuples of one per cache where there are several, and their new tokens.
        step: of other sequences, in the same pass: weights are read once, and those who decode wait for one pass
            instead of two. The new tokens are then at most a block, and nothing is scored. Logits [B + n, V].
    """
    batch = cache.prefill_batch([(sequence, len(tokens)) for sequence, tokens in work])
    tokens = np.fromiter(chain.from_iterable(tokens for _, tokens in work), np.int64, batch.num_tokens)
    ids = upload(torch.from_numpy(tokens), cache.device)
    stream: Tensor | None = None
    if batch.num_tokens <= BLOCK_TOKENS[cache.device.type]:
        flows = [_one_block(model, batch, ids, scored, step)]
    else:
        stream = torch.empty(batch.num_tokens, model.config.hidden_size, dtype=model.dtype, device=cache.device)
        flows = _in_blocks(model, batch, ids, stream, scored)
    try:
        yield from forward(cast("list[DecoderLayer]", list(model.layers)), cache, flows, batch)
    finally:
        cache.leave_prefill()
    cache.end_prefill(batch)
    if not scored:
        hidden = flows[0].x if stream is None else torch.cat([flow.x for flow in flows])
        return model.logits(hidden, flows[0].added), []
    states = flows[0].sum if stream is None else stream
    logits = model.logits(states[batch.starts[1:].long() - 1])
    return logits, [states[new.start : new.stop] for new in batch.new]


def _one_block(model: Decoder, batch: PrefillBatch, ids: Tensor, scored: bool, step: Step | None) -> Flow:
    """All of a batch's tokens ``ids`` int64 [T], behind those of a step."""
    block, last = batch.block(0, batch.num_tokens), batch.starts[1:].long() - 1
    if step is not None:
        count = len(step.ids)
        block, ids = step.batch.with_parts_of(block), torch.cat((step.ids, ids))
        last = torch.cat((torch.arange(count, device=ids.device), last + count))
    return Flow(model.embed(ids), block, None if scored else block.where_needed(last))


def _in_blocks(model: Decoder, batch: PrefillBatch, ids: Tensor, stream: Tensor, scored: bool) -> list[Flow]:
    """A batch's tokens block by block and in place, in ``stream`` [T, D]: of a long prompt nothing but that, keys and
    values is kept."""
    size, tokens = BLOCK_TOKENS[ids.device.type], batch.num_tokens
    flows = []
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        part = stream[start:stop].copy_(model.embed(ids[start:stop]))
        last = None if scored else batch.ends(start, stop)
        flows.append(Flow(part, batch.block(start, stop), last, in_place=True))
    return flows
