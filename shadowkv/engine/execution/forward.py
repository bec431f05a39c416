"""The way of tokens through a model's layers: the only place where these are walked.

Decode steps, micro-batches of them, prompts, prompts in blocks, and prompts beside a step are flows of tokens with a
batch each. What drives the walk may pause it wherever it yields, or capture it in a graph. The runner makes the flows
of steps, ``prefill`` those of prompts: into one cache or into several at once, or in one pass with a step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.cache import FanOut, KVCache
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.prefill.batch import PrefillBatch
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.models.decoder import Decoder

BLOCK_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens that go through a layer together; a prefill can be paused between blocks."""


class Flow:
    """Tokens on their way through the layers.

    Args:
        x: their residual stream [T, D] before the first layer.
        batch: what the cache makes of them.
        last: the same in the last layer, where attention may be needed of fewer tokens; None where it is not.
        in_place: whether ``x`` is changed in every layer, so that nothing else is kept of the tokens between two.

    Attributes:
        x: the residual stream, in the end of the tokens whose attention the last layer needs.
        added: what is to be added to it; None where that has been done.
    """

    def __init__(self, x: Tensor, batch: Batch, last: Batch | None = None, in_place: bool = False) -> None:
        self.x = x
        self.added: Tensor | None = None
        self._batch, self._last, self._in_place = batch, last or batch, in_place
        self._finish: Callable[[], tuple[Tensor, Tensor]] | None = None

    @property
    def sum(self) -> Tensor:
        """Both together."""
        return self.x if self.added is None else self.x + self.added

    def start(self, layer: DecoderLayer, cache: Any, is_last: bool) -> None:
        """Starts a layer, the one before has been finished."""
        batch = self._last if is_last else self._batch
        if batch.needed is not None and not len(batch.needed):
            layer.append(self.x, self.added, cache, batch)
            self.x, self.added = self.x[:0], None
        else:
            self._finish = layer.start(self.x, self.added, cache, batch)

    def finish(self) -> None:
        """Finishes the layer that has been started, if any."""
        if self._finish is None:
            return
        (x, added), self._finish = self._finish(), None
        if self._in_place:
            self.x = torch.add(x, added, out=self.x if len(x) == len(self.x) else None)
        else:
            self.x, self.added = x, added


def forward(
    layers: Sequence[DecoderLayer], cache: KVCache | FanOut, flows: Sequence[Flow], storing: PrefillBatch | None = None
) -> Generator[None, None, None]:
    """Takes ``flows`` through ``layers``, each layer in their order, and pauses after each flow of each layer.

    Args:
        storing: prompts among the tokens, each layer of which the cache stores once all flows, its blocks, have been
            through it. Without it flows are micro-batches, each of which finishes a layer when it is to start the next
            one: what it waits for arrives while the others compute.
    """
    for number, layer in enumerate(layers, 1):
        for flow in flows:
            flow.finish()
            flow.start(layer, cache, number == len(layers))
            if storing is not None:
                flow.finish()
            yield
        if storing is not None:
            cache.finish_prefill(number - 1, storing)
    for flow in flows:
        flow.finish()


def run_through(generator: Generator[None, None, Any]) -> Any:
    """What a generator returns, without any pause."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


class Step(NamedTuple):
    """A decode step beside prompts: its batch, what is due before it has been compressed, and its tokens int64 [B]."""

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
        if stream is None:
            return model.logits(flows[0].x, flows[0].added), []
        return model.logits(torch.cat([flow.x for flow in flows])[batch.are_ends(_spans(batch, cache.device))]), []
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
    flows = []
    for start, stop in _spans(batch, ids.device):
        part = stream[start:stop].copy_(model.embed(ids[start:stop]))
        last = None if scored else batch.ends(start, stop)
        flows.append(Flow(part, batch.block(start, stop), last, in_place=True))
    return flows


def _spans(batch: PrefillBatch, device: torch.device) -> list[tuple[int, int]]:
    """Where the blocks of a batch begin and end."""
    size, tokens = BLOCK_TOKENS[device.type], batch.num_tokens
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
