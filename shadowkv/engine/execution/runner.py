"""Runs the model over batches: prefill layer by layer and block by block, decode one token for every sequence, or both
in one pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shadowkv.engine.execution.cuda_graphs import CudaGraphs, PromptInputs
from shadowkv.engine.execution.forward import Flow, Step, forward, pieces, prefill, run_through
from shadowkv.engine.execution.fused_layers import FusedLayers
from shadowkv.engine.execution.sampler import Sampler, logprobs_of
from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.decode.batch import DecodePlan, micro_batches
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.models.decoder import Decoder

Result = TypeVar("Result")

SCORED_TOKENS = 512
"""Prompt tokens whose logits are held at once."""


class Runner:
    """A model and the cache that its attention reads.

    Args:
        graphs_up_to: most sequences that decode together, where decode steps are to be CUDA graphs; None runs them
            eagerly.

    Attributes:
        sampler: chooses tokens from the logits.
        chosen: int64 [slots], tokens of the last step that are only on the device; written by whatever chooses them.
    """

    def __init__(self, model: Decoder, cache: KVCache, graphs_up_to: int | None = None) -> None:
        self.model, self.cache = model, cache
        self.layers = cast("list[DecoderLayer]", list(model.layers))
        self._kinds = kinds(self.layers, [group for group, _ in cache.layout.places])
        self.sampler = Sampler(cache.ops)
        self._fused = FusedLayers(model, cache) if FusedLayers.fit(model, cache) else None
        self.chosen = torch.zeros(cache.slots, dtype=torch.int64, device=cache.device)
        together = model.group.size > 1
        self.graphs = None
        if graphs_up_to is not None:
            self.graphs = CudaGraphs(cache, self.step, graphs_up_to, model.config.vocab_size, together)

    @property
    def captures(self) -> int:
        """CUDA graphs captured so far."""
        return 0 if self.graphs is None else self.graphs.captures

    def drop_graphs(self) -> None:
        """Frees all CUDA graphs; no step may follow."""
        if self.graphs is not None:
            self.graphs.drop()

    def unprepared(
        self, sequences: list[CachedSequence], joining: list[tuple[CachedSequence, int]]
    ) -> DecodePlan | None:
        """A step of padding rows, for ``prepare``, if the first step that ``sequences`` take together with those of
        ``joining``, whose prompts are being computed and have the given lengths, will have no graph."""
        if self.graphs is None:
            return None
        plan = self.cache.forecast_decode(sequences, joining)
        return None if plan is None or self.graphs.has(plan) else plan

    @torch.inference_mode()
    def prepare(self, plan: DecodePlan, batch: int | None = None, rows: int = 0) -> None:
        """Captures the graph of a plan's shapes, for as many sequences or for ``batch``, alone or with prompts of up to
        ``rows`` tokens that stay exact, once the device has finished its work: PyTorch waits for that before a capture,
        and the device is then idle until the capture ends."""
        assert self.graphs is not None
        with suppress(torch.OutOfMemoryError):  # such steps run without a graph
            self.graphs.prepare(plan, batch, rows)

    def prefill(
        self, work: list[tuple[CachedSequence, list[int]]], scored: bool = False
    ) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
        """``prefill`` into the runner's cache."""
        return prefill(self.model, self.cache, work, scored)

    def prefill_pieces(self, tokens: int) -> int:
        """Pieces, between which it may be paused, of a prefill of ``tokens`` tokens."""
        return pieces(len(self.layers), tokens, self.cache.device)

    @torch.inference_mode()
    def prompt_logprobs(self, hidden: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs | None]:
        """Log-probabilities of a prompt's ``tokens`` from its hidden states [n, D], those of rank 0 on every rank; the
        first token has none."""
        self.model.group.copy_first(hidden)
        logprobs: list[TokenLogprobs | None] = [None]
        for start in range(0, len(tokens) - 1, SCORED_TOKENS):
            following = tokens[start + 1 : start + 1 + SCORED_TOKENS]
            logits = self.model.logits(hidden[start : start + len(following)])
            logprobs += logprobs_of(logits, following, [count] * len(following))
        return logprobs

    def collective_rpc(self, function: Callable[..., Result], sequences: list[CachedSequence], *what: Any) -> Result:
        """What ``function(runner, sequences, *what)`` returns; every other rank calls it with its own runner and its
        own parts of the sequences. They look it up by name, so its module must be importable there."""
        return function(self, sequences, *what)

    @torch.inference_mode()
    def decode(
        self,
        sequences: list[CachedSequence],
        tokens: list[int],
        sources: list[int] | None = None,
        record: AbstractContextManager[Any] | None = None,
        prompts: Sequence[tuple[CachedSequence, list[int]]] = (),
    ) -> Tensor:
        """One step: appends each sequence's token and returns float32 logits [B, V] of the next.

        A row of ``sources`` that is not -1 names the row of ``chosen`` whose token it takes instead. A step within a
        ``record`` is not a CUDA graph; where there is no memory for it, as graphs hold some, it runs unrecorded.

        ``prompts``, at most a block of new tokens of other sequences, are computed in the same pass: [B + n, V]. It is
        a CUDA graph for prompts that stay exact. If it raises, those sequences can only be released, and the step
        can run without them.
        """
        if sources is not None and any(source >= 0 for source in sources):
            self.model.group.copy_first(self.chosen)  # only rank 0 chooses
        plan, sources = self.cache.plan_decode(sequences), sources or [-1] * len(tokens)
        logits = None
        if self.graphs is not None and record is None:
            logits = self._captured(plan, tokens, sources, prompts)
        if logits is None:
            try:
                with record or nullcontext():
                    logits = self._uncaptured(plan, tokens, sources, list(prompts))
            except torch.OutOfMemoryError:
                if prompts or self.graphs is None or self.model.group.size > 1:
                    raise
        if logits is None:
            logits = self._captured(plan, tokens, sources, ())
            assert logits is not None, "steps alone always run"
        self.cache.end_decode(plan)
        return logits

    def _captured(
        self,
        plan: DecodePlan,
        tokens: list[int],
        sources: list[int],
        prompts: Sequence[tuple[CachedSequence, list[int]]],
    ) -> Tensor | None:
        """The pass as a CUDA graph; None where ``prompts`` are not of a kind for that, or have no graph yet."""
        assert self.graphs is not None
        new, ids = [sequence for sequence, _ in prompts], [ids for _, ids in prompts]
        if not all(self.cache.stays_exact(sequence, len(own)) for sequence, own in prompts):
            return None
        logits = self.graphs.run(plan, tokens, sources, new, ids)
        if logits is not None:
            self.cache.end_exact_prompts(new, [len(own) for own in ids])
        return logits

    def _uncaptured(
        self, plan: DecodePlan, tokens: list[int], sources: list[int], work: list[tuple[CachedSequence, list[int]]]
    ) -> Tensor:
        inputs = upload(torch.tensor([tokens, sources]), self.cache.device)
        if not work:
            return self.step(plan, None, inputs).float()
        if self.graphs is not None:  # numbers of pages as graphs have them: kernels may be compiled for each
            plan = self.cache.rounded(plan, len(tokens))
        batch = self.cache.decode_batch(plan)  # first: what is due is then sealed, whatever becomes of the prompts
        passing = prefill(self.model, self.cache, work, step=Step(batch, self._newest(inputs)))
        logits: Tensor = run_through(passing)[0]
        return logits

    def _newest(self, inputs: Tensor) -> Tensor:
        """The tokens int64 [B] that ``inputs`` int64 [2, B] of ``step`` stand for."""
        tokens, sources = inputs
        return torch.where(sources < 0, tokens, self.chosen[sources.clamp(min=0)])

    def step(
        self,
        plan: DecodePlan,
        numbers: Tensor | None,
        inputs: Tensor,
        prompts: PromptInputs | None = None,
        dry_run: bool = False,
    ) -> Tensor:
        """Logits [B, V] of a decode step in the dtype of activations, or [n, V] with ``prompts`` that stay exact beside
        it; or of a dry run of that (``CudaGraphs``): one layer of each kind.

        Args:
            plan: the step's, which holds its numbers unless ``numbers``, int64 on the device, has them.
            inputs: int64 [2, B]: newest tokens, and the rows of ``chosen`` that have them instead, or -1.
        """
        batch, ids = self.cache.decode_batch(plan, numbers), self._newest(inputs)
        if prompts is not None:
            batch = batch.with_parts_of(self.cache.exact_prompts(prompts.numbers, len(prompts.ids)))
            hidden = self.model.embed(torch.cat((ids, prompts.ids)))
            flows = [Flow(hidden, batch, batch.where_needed(prompts.rows))]
        else:
            hidden = self.model.embed(ids)
            if self._fused is not None and self.cache.query_hook is None:  # it shows no queries
                return self.model.scores(self._fused(hidden, batch))
            parts = micro_batches(batch, plan.micro_batches)
            hiddens = hidden.split([part.num_tokens for part in parts])
            flows = [Flow(*part) for part in zip(hiddens, parts, strict=True)]
        run_through(forward(self._kinds if dry_run else self.layers, self.cache, flows))
        if len(flows) == 1:
            return self.model.scores(flows[0].x, flows[0].added)
        x, added = (torch.cat([getattr(flow, name) for flow in flows]) for name in ("x", "added"))
        return self.model.scores(x, added)


def kinds(layers: list[DecoderLayer], groups: Sequence[int]) -> list[DecoderLayer]:
    """The first layer, to which nothing is added, and one of each form of the others: fp8 checkpoints may leave some
    layers unquantized, and the cache has ``groups`` of layers, by their numbers."""
    first_of: dict[tuple[object, ...], DecoderLayer] = {}
    for number, layer in enumerate(layers[1:], 1):
        form = tuple((name, x.dtype, x.shape) for name, x in layer.state_dict().items())
        first_of.setdefault((groups[number], *form), layer)
    return [*layers[:1], *first_of.values()]
