"""The forward pass: the loop over a model's layers. Only ``FusedLayers``, which decodes on a CPU, has its own loop.
``runner.py`` calls ``forward`` and ``prefill``. Evaluations call ``prefill`` too.

A flow is a set of tokens that pass through the layers together, with the cache's batch of these tokens: a decode step,
a micro-batch, a prompt, a block of a long prompt, or a step with prompts. The caller can pause the loop at every yield,
or capture it in a CUDA graph. ``runner.py`` makes the flows of decode steps, and ``prefill`` makes those of prompts:
for one cache, for several caches at once, or in one pass with a step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.fan_out import FanOut
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.prefill.prefill_batch import PrefillBatch
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.layers.per_layer_inputs import LayerInput
from shadowkv.models.decoder import Decoder

BLOCK_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens of a block, by device type. A block's tokens go through a layer together; a prefill can pause between
blocks."""


class Ends(NamedTuple):
    """The tokens of a flow that the layers without keys of their own compute.

    Attributes:
        batch: the cache's batch of these tokens alone.
        own: computes the per-layer inputs of these tokens (``Decoder.layer_inputs``).
    """

    batch: Batch
    own: LayerInput | None


class Flow:
    """Tokens on their way through the layers.

    Args:
        x: residual stream [T, D] before the first layer, of T tokens and D hidden dimensions.
        batch: the cache's batch of these tokens.
        last: the batch for the last layer, if this layer needs attention for fewer tokens; None to use ``batch``. With
            ``ends``, ``last`` is for the last layer with keys of its own.
        in_place: whether each layer writes its result into ``x``, which saves memory.
        own: computes the per-layer inputs of the tokens (``Decoder.layer_inputs``).
        ends: the tokens that the layers after the layer of ``last`` compute: those for which ``last`` needs attention.
            None to compute all tokens up to the last layer.

    Attributes:
        x: residual stream. After the layer of ``last`` it has only the tokens for which ``last`` needs attention.
        added: the newest layer's output, which is not yet added to ``x``; None if nothing is left to add.
    """

    def __init__(
        self,
        x: Tensor,
        batch: Batch,
        last: Batch | None = None,
        in_place: bool = False,
        own: LayerInput | None = None,
        ends: Ends | None = None,
    ) -> None:
        self.x, self._own, self.ends = x, own, ends
        self.added: Tensor | None = None
        self._batch, self._last, self._in_place = batch, last or batch, in_place
        self._finish: Callable[[], tuple[Tensor, Tensor]] | None = None

    @property
    def sum(self) -> Tensor:
        """The residual stream with ``added``."""
        return self.x if self.added is None else self.x + self.added

    def start(self, layer: DecoderLayer, cache: Any, is_last: bool) -> None:
        """Starts a layer. The layer before must be finished. ``is_last`` says whether it is the layer of ``last``."""
        batch = self._last if is_last else self._batch
        if batch.needed is not None and not len(batch.needed):
            layer.append(self.x, self.added, cache, batch)
            self.x, self.added = self.x[:0], None
        elif len(self.x):
            self._finish = layer.start(self.x, self.added, cache, batch, self._own)
        if is_last and self.ends is not None:
            self._batch, self._own = self.ends

    def finish(self) -> None:
        """Finishes the started layer, if there is one."""
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
    """Computes ``flows`` layer by layer. Yields after each flow of each layer, except in the layers that compute only
    ``Flow.ends``.

    Args:
        storing: the batch of the prompts among the tokens. The flows are then the prompts' blocks. The cache stores a
            layer's keys and values when all blocks have passed the layers that attend to these keys. Without
            ``storing`` the flows are micro-batches: each one finishes a layer only when it starts the next, so that
            values from the host arrive while other micro-batches compute.
    """
    last_use = {layer.cached_as: number for number, layer in enumerate(layers, 1)}
    with_keys = sum(not layer.reuses_keys for layer in layers)  # layers that reuse keys come last
    for number, layer in enumerate(layers, 1):
        for flow in flows:
            flow.finish()
            last = len(layers) if flow.ends is None else with_keys
            flow.start(layer, cache, number == last)
            if storing is not None:
                flow.finish()
            if number <= last:
                yield
        if storing is not None and last_use[layer.cached_as] == number:
            cache.finish_prefill(layer.cached_as, storing)
    for flow in flows:
        flow.finish()


def run_through(generator: Generator[None, None, Any]) -> Any:
    """Runs a generator to its end without pauses, and returns its result."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


class Step(NamedTuple):
    """A decode step in the same pass as prompts: its batch, for which due pages are already compressed, and the token
    ids int64 [B] of its B rows."""

    batch: Batch
    ids: Tensor


def pieces(model: Decoder, tokens: int, scored: bool) -> int:
    """Returns the number of pieces of a prefill of ``tokens`` tokens. The prefill can be paused between two pieces.
    ``scored`` is as for ``prefill``."""
    layers = model.config.num_layers - (0 if scored else model.config.num_kv_shared_layers)
    return layers * -(-tokens // BLOCK_TOKENS[model.device.type])


def prefill(
    model: Decoder,
    cache: KVCache | FanOut,
    work: list[tuple[Any, list[int]]],
    scored: bool = False,
    step: Step | None = None,
) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
    """Computes new tokens of admitted sequences.

    Unless ``scored``, the last layer with keys of its own computes keys and values of all tokens, but attention and MLP
    only of each sequence's last token. Later layers compute only these last tokens. If a draft head reads the prompts,
    the last layer computes the last ``Decoder.prompt_tail`` tokens of each, and leaves their final hidden states in
    ``Decoder.prompt_states``.

    Yields wherever it can be paused for a decode step, or closed. The sequences of a closed prefill can only be
    released.

    Args:
        work: pairs of a sequence and its new tokens. With several caches, the first entry of a pair is a tuple with one
            sequence per cache.
        scored: whether to return final hidden states too.
        step: a decode step of other sequences in the same pass. The weights are then read once, and running sequences
            wait for one pass instead of two. The new tokens must fit into a block, and ``scored`` must be False.

    Returns:
        Float32 logits [n, V] of the last token of each of the n sequences. With ``step``, its B rows come first:
        [B + n, V]. If ``scored``, also the final hidden states [tokens, D] of each sequence; otherwise an empty list.
    """
    batch = cache.prefill_batch([(sequence, len(tokens)) for sequence, tokens in work])
    tokens = np.fromiter(chain.from_iterable(tokens for _, tokens in work), np.int64, batch.num_tokens)
    ids = upload(torch.from_numpy(tokens), cache.device)
    stream: Tensor | None = None
    if batch.num_tokens <= BLOCK_TOKENS[cache.device.type]:
        flows = [_one_block(model, batch, ids, scored, step)]
    else:
        stream = torch.empty(batch.num_tokens, model.config.stream_size, dtype=model.dtype, device=cache.device)
        flows = _in_blocks(model, batch, ids, stream, scored)
    try:
        yield from forward(cast("list[DecoderLayer]", list(model.layers)), cache, flows, batch)
    finally:
        cache.leave_prefill()
    cache.end_prefill(batch)
    rows = 0 if step is None else len(step.ids)
    if not scored:
        if stream is None:
            return _logits(model, batch, flows[0].x, flows[0].added, rows), []
        joined = torch.cat([flow.x for flow in flows])
        return _logits(model, batch, joined[batch.tails(model.prompt_tail, _spans(batch, cache.device))]), []
    states = flows[0].sum if stream is None else stream
    logits = _logits(model, batch, states[batch.tails(model.prompt_tail)])
    return logits, [states[new.start : new.stop] for new in batch.new]


def _logits(model: Decoder, batch: PrefillBatch, x: Tensor, added: Tensor | None = None, rows: int = 0) -> Tensor:
    """Returns the logits of ``rows`` rows of a step and of each prompt's last token, float32 [rows + S, V]. Keeps the
    final hidden states of the prompts if a draft head reads them.

    Args:
        x, added: as for ``Decoder.logits``, of the step's rows and of the last ``Decoder.prompt_tail`` new tokens of
            each prompt.
    """
    if model.prompt_tail == 1:
        return model.logits(x, added)
    normed = model.normed(x, added)
    model.prompt_states = normed[rows:]
    ends = batch.last_of_tails(model.prompt_tail)
    return model.kept_scores(torch.cat((normed[:rows], model.prompt_states[ends]))).float()


def _one_block(model: Decoder, batch: PrefillBatch, ids: Tensor, scored: bool, step: Step | None) -> Flow:
    """Makes one flow of all tokens ``ids`` int64 [T] of a batch. The tokens of ``step`` come first."""
    block, last = batch.block(0, batch.num_tokens), batch.tails(model.prompt_tail)
    narrows = model.config.num_kv_shared_layers and not scored
    alone = batch.only_ends(0, batch.num_tokens) if narrows else None
    if step is not None:
        count = len(step.ids)
        block, ids = step.batch.with_parts_of(block), torch.cat((step.ids, ids))
        last = torch.cat((torch.arange(count, device=ids.device), last + count))
        alone = None if alone is None else step.batch.with_parts_of(alone)
    x = model.embed(ids)
    ends = None if alone is None else Ends(alone, model.layer_inputs(ids[last], x[last]))
    return Flow(x, block, None if scored else block.where_needed(last), own=model.layer_inputs(ids, x), ends=ends)


def _in_blocks(model: Decoder, batch: PrefillBatch, ids: Tensor, stream: Tensor, scored: bool) -> list[Flow]:
    """Makes a flow for each block of a batch. Flows are computed in place in ``stream`` [T, D]. Between layers a long
    prompt keeps only ``stream``, keys and values."""
    flows = []
    for start, stop in _spans(batch, ids.device):
        own = model.layer_inputs(ids[start:stop])
        part = stream[start:stop].copy_(model.embed(ids[start:stop]))
        last, ends = None if scored else batch.ends(start, stop, model.prompt_tail), None
        if last is not None and model.config.num_kv_shared_layers:
            ends = Ends(batch.only_ends(start, stop), model.layer_inputs(last.of_needed(ids[start:stop])))
        flows.append(Flow(part, batch.block(start, stop), last, in_place=True, own=own, ends=ends))
    return flows


def _spans(batch: PrefillBatch, device: torch.device) -> list[tuple[int, int]]:
    """Start and stop, in tokens, of each block of a batch."""
    size, tokens = BLOCK_TOKENS[device.type], batch.num_tokens
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
