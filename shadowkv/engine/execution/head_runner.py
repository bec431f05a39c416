"""``HeadRunner``: runs a model's draft head. ``HeadDrafts`` calls it.

The head has a cache of its own with a sequence for each request that decodes. It reads a prompt's hidden states as soon
as the model has computed them. Those of a step are kept until the tokens that follow are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from shadowkv.engine.execution.cuda_graphs import PROMPT_ROWS
from shadowkv.engine.execution.forward import Flow, forward, run_through
from shadowkv.engine.execution.runner import Runner
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.decoder import Decoder


class HeadRunner(Runner):
    """The draft head of a model, and the cache that it attends to.

    Args:
        of_model: runs the model, which must have a draft head.
        cache: the head's cache.
        rows: maximum number of rows of a step, of the model and of the head.
        kept: number of the model's hidden states that are kept.
    """

    def __init__(self, of_model: Runner, cache: KVCache, rows: int, kept: int) -> None:
        model, head = of_model.model, of_model.model.draft_head
        graphs = None if cache.ops.synchronising else of_model.graphs  # in a capture the host must not wait
        assert head is not None, "the model has no draft head"
        limit, logits = (None, None) if graphs is None else (graphs.max_batch, graphs.logits)
        super().__init__(cast(Decoder, head), cache, limit, logits)  # the head has all methods that steps call
        head.reserve(rows)
        self.head, self._last, size = head, head.states, model.config.hidden_size
        self._model = model
        model.prompt_tail = self.window
        self._of_model = model.states = torch.zeros(rows, size, dtype=model.dtype, device=cache.device)
        self._kept = torch.zeros(kept, size, dtype=model.dtype, device=cache.device)
        if of_model.graphs is not None:
            model.graph_states = torch.zeros(PROMPT_ROWS[-1], size, dtype=model.dtype, device=cache.device)

    @property
    def window(self) -> int:
        """Number of newest tokens that the head attends to."""
        window = self.cache.layout.main.window
        assert window is not None, "ModelConfig.of_draft_head has one"
        return window

    @torch.inference_mode()
    def begin(self, sequences: list[CachedSequence], tokens: Sequence[list[int]], places: list[int]) -> None:
        """Reads the hidden states of the prompts that the model has computed last, of up to ``window`` new tokens of
        each. Appends a row for each of these tokens except the prompt's last, without logits. The state of the last one
        is kept.

        Args:
            sequences: a new sequence of the head for each prompt.
            tokens: for each prompt, the tokens that follow those of its rows.
            places: where the states of the prompts' last tokens are kept.
        """
        states, self._model.prompt_states = self._model.prompt_states, None
        assert states is not None, "no prompt was computed"
        ends = [stop - 1 for stop in accumulate(len(own) + 1 for own in tokens)]
        self._kept[self._uploaded(places)] = states[self._uploaded(ends)]
        work = [(sequence, len(own)) for sequence, own in zip(sequences, tokens, strict=True) if own]
        if not work:
            return
        rows, last = range(len(states)), set(ends)
        stream = self.head.embed(
            self._uploaded([token for own in tokens for token in own]),
            states[self._uploaded([row for row in rows if row not in last])],
        )
        batch = self.cache.prefill_batch(work)
        block = batch.block(0, batch.num_tokens)
        flow = Flow(stream, block.where_needed(self._uploaded([])))  # only keys and values
        try:
            run_through(forward(self.layers, self.cache, [flow], batch))
        finally:
            self.cache.leave_prefill()
        self.cache.end_prefill(batch)

    @torch.inference_mode()
    def keep(self, places: list[int]) -> None:
        """Keeps the model's final hidden states of the first n rows of its last step, in ``places`` [n]."""
        self._kept[self._uploaded(places)] = self._of_model[: len(places)]

    @torch.inference_mode()
    def read(self, sequences: list[CachedSequence], tokens: Sequence[list[int]], places: list[int]) -> Tensor:
        """Appends rows to each sequence: ``tokens``, each with the kept hidden state of the token before it. ``places``
        are the places of these states, for all rows in order. Returns float32 logits [B, V] of the last row of each of
        the B sequences."""
        self.head.inputs[: len(places)] = self._kept[self._uploaded(places)]
        first, others = [own[0] for own in tokens], [own[1:] for own in tokens]
        logits = Runner.decode(self, sequences, first, drafts=others)
        ends = self._uploaded([stop - 1 for stop in accumulate(map(len, tokens))])
        self._last = self.head.states[ends]
        return logits[ends]

    @torch.inference_mode()
    def draft(self, sequences: list[CachedSequence], sources: list[int]) -> Tensor:
        """Appends a row to each of B sequences. ``sources`` names a row of the previous call for each sequence. The new
        row's inputs are the token that was chosen for the source row (``Runner.chosen``), and the head's hidden state
        of that row. Returns float32 logits [B, V]."""
        self.head.inputs[: len(sources)] = self._last[self._uploaded(sources)]
        logits = Runner.decode(self, sequences, [0] * len(sources), sources)
        self._last = self.head.states[: len(sources)]
        return logits

    def _uploaded(self, rows: Sequence[int]) -> Tensor:
        return upload(torch.tensor(rows, dtype=torch.int64), self.cache.device)
