"""Runs the model over batches: prefill layer by layer and block by block, decode one token for every sequence."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from collections.abc import Sequence as Items
from typing import TypeVar, cast

import torch
from torch import Tensor

from shadowkv.engine.cuda_graphs import CudaGraphs
from shadowkv.engine.request import TokenLogprobs
from shadowkv.engine.sampler import logprobs_of
from shadowkv.kvcache.batch import DecodeBatch, DecodePlan
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.sequence import Sequence
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.models.decoder import Decoder

Result = TypeVar("Result")
Forks = Items[tuple[KVCache, list[Sequence]]]

BLOCK_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens that go through a layer together; a prefill can be paused between blocks."""

SCORED_TOKENS = 512
"""Prompt tokens whose logits are held at once."""


class Runner:
    """A model and the cache that its attention reads.

    Args:
        graphs_up_to: sequences that decode together at the most, where decode steps are to be CUDA graphs; None runs
            them as they are.

    Attributes:
        chosen: int64 [slots], tokens of the last step that are on the device only; whoever chooses them writes them.
    """

    def __init__(self, model: Decoder, cache: KVCache, graphs_up_to: int | None = None) -> None:
        self.model, self.cache = model, cache
        self.layers = cast("list[DecoderLayer]", list(model.layers))
        self.block_tokens = BLOCK_TOKENS[cache.device.type]
        self.chosen = torch.zeros(cache.pool.table.padding_slot, dtype=torch.int64, device=cache.device)
        self.graphs = None if graphs_up_to is None else CudaGraphs(cache, self._step, graphs_up_to)

    def prefill(
        self, work: list[tuple[Sequence, list[int]]], forks: Forks = ()
    ) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
        """Computes new tokens of admitted sequences; returns float32 logits [n, V] of each one's last, and
        the final hidden states [tokens, D] of each one.

        ``forks`` are other caches with a new, empty sequence for each of ``work``, which must be new as well: they
        store the same keys and values, since prefill attention is exact under every policy.

        Yields wherever it may be paused for a decode step, or closed for good; the sequences of a closed prefill can
        only be released.
        """
        cache, model = self.cache, self.model
        batch = cache.prefill_batch([(sequence, len(tokens)) for sequence, tokens in work])
        copies = [(other, batch.of(sequences)) for other, sequences in forks]
        hidden = model.embed(torch.tensor([token for _, tokens in work for token in tokens], device=cache.device))
        starts = range(0, batch.num_tokens, self.block_tokens)
        blocks = [batch.block(start, min(start + self.block_tokens, batch.num_tokens)) for start in starts]
        try:
            for number, layer in enumerate(self.layers):
                if len(blocks) == 1:
                    hidden = torch.add(*layer(hidden, None, cache, blocks[0]))
                    yield
                else:
                    for block in blocks:
                        layer.append(hidden[block.start : block.stop], cache, block)
                    for block in blocks:
                        rows = slice(block.start, block.stop)
                        hidden[rows] = layer.attend(hidden[rows], cache, block)
                        yield
                cache.finish_prefill(number, batch)
                for other, forked in copies:
                    other.finish_prefill(number, forked)
        finally:
            cache.leave_prefill()
        cache.end_prefill(batch)
        for other, forked in copies:
            other.end_prefill(forked)
        states = [hidden[segment.start : segment.stop] for segment in batch.segments]
        return model.logits(torch.stack([state[-1] for state in states])), states

    @torch.inference_mode()
    def prompt_logprobs(self, hidden: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs | None]:
        """Log-probabilities of a prompt's ``tokens`` from its hidden states [n, D]; the first token has none."""
        found: list[TokenLogprobs | None] = [None]
        for start in range(0, len(tokens) - 1, SCORED_TOKENS):
            wanted = tokens[start + 1 : start + 1 + SCORED_TOKENS]
            logits = self.model.logits(hidden[start : start + len(wanted)])
            found += logprobs_of(logits, wanted, [count] * len(wanted))
        return found

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence], tokens: list[int], sources: list[int] | None = None) -> Tensor:
        """One step: appends each sequence's token and returns float32 logits [B, V] of the next.

        A row of ``sources`` that is not -1 names the row of ``chosen`` whose token it takes instead.
        """
        plan = self.cache.plan_decode(sequences)
        if self.graphs is not None:
            logits = self.graphs.decode(plan, tokens, sources or [-1] * len(tokens))
        else:
            inputs = torch.tensor([tokens, sources or [-1] * len(tokens)], device=self.cache.device)
            logits = self._step(plan, None, inputs)
        self.cache.end_decode(plan)
        return logits

    def _step(self, plan: DecodePlan, numbers: Tensor | None, inputs: Tensor) -> Tensor:
        batch = self.cache.decode_batch(plan, numbers)
        tokens, sources = inputs
        hidden = self.model.embed(torch.where(sources < 0, tokens, self.chosen[sources.clamp(min=0)]))
        micro_batches = batch.split(plan.micro_batches)
        parts = hidden.split([len(one.positions) for one in micro_batches])
        results = _interleave(map(self._layer_by_layer, parts, micro_batches))
        if len(results) == 1:
            return self.model.logits(*results[0])
        hiddens, added = zip(*results, strict=True)
        return self.model.logits(torch.cat(hiddens), torch.cat(added))

    def _layer_by_layer(self, hidden: Tensor, batch: DecodeBatch) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Takes a micro-batch through all layers, and pauses where attention may have to wait."""
        added = None
        for layer in self.layers:
            finish = layer.begin(hidden, added, self.cache, batch)
            yield
            hidden, added = finish()
        assert added is not None, "a model without layers"
        return hidden, added


def _interleave(generators: Iterable[Generator[None, None, Result]]) -> list[Result]:
    """What generators with equally many pauses return; they go on to their next pause one after the other."""
    running, results = list(generators), list[Result]()
    while len(results) < len(running):
        for generator in running:
            try:
                next(generator)
            except StopIteration as end:
                results.append(end.value)
    return results
