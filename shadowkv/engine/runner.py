"""Runs the model over batches: prefill layer by layer and block by block, decode one token for every sequence."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar, cast

import torch
from torch import Tensor

from shadowkv.engine.cuda_graphs import CudaGraphs
from shadowkv.engine.prefill import BLOCK_TOKENS, prefill
from shadowkv.engine.request import TokenLogprobs
from shadowkv.engine.sampler import Sampler, logprobs_of
from shadowkv.kvcache.batch import DecodeBatch, DecodePlan
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.sequence import Sequence
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.models.decoder import Decoder

Result = TypeVar("Result")

SCORED_TOKENS = 512
"""Prompt tokens whose logits are held at once."""


class Runner:
    """A model and the cache that its attention reads.

    Args:
        graphs_up_to: sequences that decode together at the most, where decode steps are to be CUDA graphs; None runs
            them as they are.

    Attributes:
        sampler: chooses tokens by the logits.
        chosen: int64 [slots], tokens of the last step that are on the device only; whoever chooses them writes them.
    """

    def __init__(self, model: Decoder, cache: KVCache, graphs_up_to: int | None = None) -> None:
        self.model, self.cache = model, cache
        self.layers = cast("list[DecoderLayer]", list(model.layers))
        self.sampler = Sampler(cache.ops)
        self.chosen = torch.zeros(cache.slots, dtype=torch.int64, device=cache.device)
        self.graphs = None if graphs_up_to is None else CudaGraphs(cache, self._step, graphs_up_to)

    @property
    def captures(self) -> int:
        """CUDA graphs captured so far."""
        return 0 if self.graphs is None else self.graphs.captures

    def prefill(self, work: list[tuple[Sequence, list[int]]]) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
        """``prefill`` into the runner's cache."""
        return prefill(self.model, self.cache, work)

    def prefill_pieces(self, tokens: int) -> int:
        """Pieces, between which it may be paused, of a prefill of so many tokens."""
        return len(self.layers) * -(-tokens // BLOCK_TOKENS[self.cache.device.type])

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
