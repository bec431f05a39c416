"""``Runner``: runs the model over batches. It prefills layer by layer and block by block, decodes one token for every
sequence, or does both in one pass. The engine's schedulers call it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shadowkv.engine.execution.cuda_graphs import CudaGraphs, PromptInputs
from shadowkv.engine.execution.forward import Flow, Step, forward, pieces, prefill, run_through
from shadowkv.engine.execution.fused_layers import FusedLayers
from shadowkv.engine.execution.sampler import Sampler, logprobs_of
from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.kvcache.decode.decode_batch import DecodePlan, micro_batches
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.layers.decoder_layer import DecoderLayer
from shadowkv.models.decoder import Decoder

Result = TypeVar("Result")

SCORED_TOKENS = 512
"""Number of prompt tokens whose logits are computed at once."""


class Runner:
    """A model and the cache that its attention reads.

    Args:
        graphs_up_to: maximum number of rows of a decode step that runs as a CUDA graph; None to run every step
            eagerly.
        logits: where CUDA graphs write logits, as in ``CudaGraphs``.

    Attributes:
        sampler: chooses tokens from the logits.
        chosen: int64 [slots] on the device: the tokens of the last step, which the host may not have seen yet.
            ``DecodeSteps`` writes them.
        graphs: the CUDA graphs; None for eager steps.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        graphs_up_to: int | None = None,
        logits: Tensor | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.layers = cast("list[DecoderLayer]", list(model.layers))
        places = cache.layout.places
        self._kinds = kinds(self.layers, [places[layer.cached_as][0] for layer in self.layers])
        self.sampler = Sampler(cache.ops)
        self._fused = FusedLayers(model, cache) if FusedLayers.fit(model, cache) else None
        self.chosen = torch.zeros(cache.slots, dtype=torch.int64, device=cache.device)
        together = model.group.size > 1
        self.graphs = None
        if graphs_up_to is not None:
            self.graphs = CudaGraphs(cache, self.step, graphs_up_to, model.config.vocab_size, together, logits)

    @property
    def captures(self) -> int:
        """Number of CUDA graphs captured so far."""
        return 0 if self.graphs is None else self.graphs.captures

    @property
    def eager_runs(self) -> int:
        """Number of eager runs so far of shapes that will have a CUDA graph. Such a run takes longer than later steps
        of its shape, which have a graph."""
        return 0 if self.graphs is None else self.graphs.eager_runs

    def drop_graphs(self) -> None:
        """Frees all CUDA graphs. No step can follow."""
        if self.graphs is not None:
            self.graphs.drop()

    def unprepared(
        self, sequences: list[CachedSequence], joining: list[tuple[CachedSequence, int]]
    ) -> DecodePlan | None:
        """Returns the plan of the next step of ``sequences`` and ``joining``, to pass to ``prepare``. Returns None if
        the plan has a graph, if all steps are eager, or if the step's shapes are not known yet.

        Args:
            joining: sequences whose prompts are being computed, with the prompts' lengths.
        """
        if self.graphs is None:
            return None
        plan = self.cache.forecast_decode(sequences, joining)
        return None if plan is None or self.graphs.has(plan) else plan

    @torch.inference_mode()
    def prepare(self, plan: DecodePlan, batch: int | None = None, rows: int = 0, compressing: bool = False) -> None:
        """Captures the graph of a plan's shapes.

        PyTorch waits for the device before a capture, and the device is idle until the capture ends.

        Args:
            batch: rows of the step; None for the plan's.
            rows: number of prompt tokens in the step, including padding; 0 for a step without prompts.
            compressing: whether the step reads or writes compressed pages of its prompts' sequences, or learns from the
                prompts' queries (``KVCache.compressing``).
        """
        assert self.graphs is not None
        with suppress(torch.OutOfMemoryError):  # steps of this shape run without a graph
            self.graphs.prepare(plan, batch, rows, compressing)

    def can_capture(self, prompts: Sequence[tuple[CachedSequence, int]]) -> bool:
        """Whether a step with these prompts, pairs of a sequence and its number of new tokens, can be a CUDA graph."""
        if self.graphs is None or not all(self.cache.can_capture(*prompt) for prompt in prompts):
            return False
        sequences, lengths = [sequence for sequence, _ in prompts], [tokens for _, tokens in prompts]
        return self.graphs.prompt_shape(sequences, lengths) is not None

    def prefill(
        self, work: list[tuple[CachedSequence, list[int]]], scored: bool = False
    ) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
        """Calls ``forward.prefill`` with the runner's cache."""
        return prefill(self.model, self.cache, work, scored)

    def prefill_pieces(self, tokens: int, scored: bool = False) -> int:
        """Returns the number of pieces of a prefill of ``tokens`` tokens. The prefill can be paused between two pieces.
        ``scored`` is as for ``prefill``."""
        return pieces(self.model, tokens, scored)

    @torch.inference_mode()
    def prompt_logprobs(self, hidden: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs | None]:
        """Returns the log-probabilities of a prompt's n ``tokens``, None for the first. ``hidden`` [n, D] are the
        prompt's final hidden states; every rank uses rank 0's."""
        self.model.group.copy_first(hidden)
        logprobs: list[TokenLogprobs | None] = [None]
        for start in range(0, len(tokens) - 1, SCORED_TOKENS):
            following = tokens[start + 1 : start + 1 + SCORED_TOKENS]
            logits = self.model.logits(hidden[start : start + len(following)])
            logprobs += logprobs_of(logits, following, [count] * len(following))
        return logprobs

    def collective_rpc(self, function: Callable[..., Result], sequences: list[CachedSequence], *what: Any) -> Result:
        """Calls ``function(runner, sequences, *what)`` on every rank, with the rank's own runner and sequences. Returns
        rank 0's result. Ranks find the function by name, so they must be able to import its module."""
        return function(self, sequences, *what)

    @torch.inference_mode()
    def decode(
        self,
        sequences: list[CachedSequence],
        tokens: list[int],
        sources: list[int] | None = None,
        record: AbstractContextManager[Any] | None = None,
        prompts: Sequence[tuple[CachedSequence, list[int]]] = (),
        drafts: Sequence[list[int]] = (),
        drafting: bool = False,
    ) -> Tensor:
        """Runs a decode step: appends a token to each sequence and returns float32 logits [B, V] of the next tokens.
        The step has B rows, one for each appended token.

        Args:
            tokens: the token of each sequence, unless ``sources`` names a row.
            sources: for each sequence, the row of ``chosen`` that holds its token, or -1 if ``tokens`` has it. None if
                ``tokens`` has all of them.
            record: a context in which the step runs, without a CUDA graph. Such a step can run out of memory, because
                the captured graphs hold part of it. The step then runs again as a CUDA graph, outside the context.
            prompts: n other sequences and their new tokens (at most a block) for the same pass. Logits are then
                [B + n, V]. The pass is a CUDA graph if ``can_capture`` is True and its shape has a graph. If the pass
                raises, these sequences can only be released, and the step can run without them.
            drafts: for each sequence, drafted tokens, which are appended behind its token. Each is a further row of its
                sequence. Wrong tokens must be removed with ``KVCache.truncate``. Empty if nothing is drafted.
            drafting: whether it is a draft step (``KVCache.plan_decode``).
        """
        if sources is not None and any(source >= 0 for source in sources):
            self.model.group.copy_first(self.chosen)  # only rank 0 chooses tokens
        sources, counts = sources or [-1] * len(tokens), None
        if drafts:
            counts = [1 + len(draft) for draft in drafts]
            tokens = [one for token, draft in zip(tokens, drafts, strict=True) for one in (token, *draft)]
            sources = [
                row for source, draft in zip(sources, drafts, strict=True) for row in (source, *[-1] * len(draft))
            ]
        compress = None if self.graphs is None else self.graphs.compress
        plan = self.cache.plan_decode(sequences, counts, drafting, compress)
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
            assert logits is not None, "a step without prompts always has logits"
        self.cache.end_decode(plan)
        return logits

    def _captured(
        self,
        plan: DecodePlan,
        tokens: list[int],
        sources: list[int],
        prompts: Sequence[tuple[CachedSequence, list[int]]],
    ) -> Tensor | None:
        """Runs the pass as a CUDA graph and returns its logits. Returns None if ``prompts`` cannot be captured, or have
        no graph yet."""
        assert self.graphs is not None
        new, ids = [sequence for sequence, _ in prompts], [ids for _, ids in prompts]
        if not all(self.cache.can_capture(sequence, len(prompt)) for sequence, prompt in prompts):
            return None
        logits = self.graphs.run(plan, tokens, sources, new, ids)
        if logits is not None:
            lengths = [len(prompt) for prompt in ids]
            self.cache.end_exact_prompts(new, lengths)
            if prompts and self.model.graph_states is not None:
                tails = [
                    torch.arange(stop - min(tokens, self.model.prompt_tail), stop)
                    for tokens, stop in zip(lengths, accumulate(lengths), strict=True)
                ]
                self.model.prompt_states = self.model.graph_states[upload(torch.cat(tails), self.cache.device)]
        return logits

    def _uncaptured(
        self, plan: DecodePlan, tokens: list[int], sources: list[int], work: list[tuple[CachedSequence, list[int]]]
    ) -> Tensor:
        inputs = upload(torch.tensor([tokens, sources]), self.cache.device)
        if not work:
            return self.step(plan, None, inputs).float()
        if self.graphs is not None:  # rounds page counts as graphs do: a kernel may be compiled for each count
            plan = self.cache.rounded(plan, len(tokens))
        batch = self.cache.decode_batch(plan)
        passing = prefill(self.model, self.cache, work, step=Step(batch, self._newest(inputs)))
        logits: Tensor = run_through(passing)[0]
        return logits

    def _newest(self, inputs: Tensor) -> Tensor:
        """The newest tokens int64 [B], from the ``inputs`` int64 [2, B] of ``step``."""
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
        """Computes a decode step and returns its logits [B, V], in the dtype of activations.

        Args:
            plan: the step's plan.
            numbers: the plan's numbers, page ids and lengths for example, packed into one int64 tensor on the device.
                None to upload them from ``plan``.
            inputs: int64 [2, B], ``tokens`` and ``sources`` as in ``decode``.
            prompts: prompts in the same pass (``KVCache.exact_prompts``). There is then one row of logits for each
                entry of ``prompts.rows``.
            dry_run: whether to compute only one layer of each kind (``CudaGraphs``).
        """
        batch, ids = self.cache.decode_batch(plan, numbers), self._newest(inputs)
        if prompts is not None:
            batch = batch.with_parts_of(
                self.cache.exact_prompts(prompts.numbers, len(prompts.ids), prompts.compressing)
            )
            ids = torch.cat((ids, prompts.ids))
            hidden = self.model.embed(ids)
            own = self.model.layer_inputs(ids, hidden)
            keeps = self.model.graph_states is not None  # a draft head reads all tokens of the prompts
            flows = [Flow(hidden, batch, None if keeps else batch.where_needed(prompts.rows), own=own)]
        else:
            hidden = self.model.embed(ids)
            if self._fused is not None and self.cache.query_hook is None:  # fused layers do not call the hook
                return self.model.scores(self._fused(hidden, batch))
            parts = micro_batches(batch, plan.micro_batches)
            counts = [part.num_tokens for part in parts]
            of_parts = zip(hidden.split(counts), parts, ids.split(counts), strict=True)
            flows = [Flow(x, part, own=self.model.layer_inputs(own, x)) for x, part, own in of_parts]
        run_through(forward(self._kinds if dry_run else self.layers, self.cache, flows))
        if prompts is not None and self.model.graph_states is not None:
            normed = self.model.normed(flows[0].x, flows[0].added)
            self.model.graph_states[: len(prompts.ids)] = normed[plan.num_rows :]
            return self.model.kept_scores(normed[prompts.rows])
        if len(flows) == 1:
            return self.model.scores(flows[0].x, flows[0].added)
        x, added = (torch.cat([getattr(flow, name) for flow in flows]) for name in ("x", "added"))
        return self.model.scores(x, added)


def kinds(layers: list[DecoderLayer], groups: Sequence[int]) -> list[DecoderLayer]:
    """Returns the layers of a dry run: the first layer, and one layer of each kind of the others.

    The first layer is listed separately because it is the only one that has no output of an earlier layer to add to the
    residual stream. Layers are of different kinds if their weights differ in dtype or shape (fp8 checkpoints can leave
    some layers unquantized) or if the cache keeps them in different groups of layers. ``groups`` are the group numbers
    of all layers.
    """
    first_of: dict[tuple[object, ...], DecoderLayer] = {}
    for number, layer in enumerate(layers[1:], 1):
        form = tuple((name, x.dtype, x.shape) for name, x in layer.state_dict().items())
        first_of.setdefault((groups[number], *form), layer)
    return [*layers[:1], *first_of.values()]
