"""``HeadRunner``: runs a model's draft head. ``HeadDrafts`` calls it.

The head has a cache of its own with a sequence for each request that decodes. The model's hidden states are kept from
the step that computes them until the tokens that follow are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

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
        self._of_model = model.states = torch.zeros(rows, size, dtype=model.dtype, device=cache.device)
        self._kept = torch.zeros(kept, size, dtype=model.dtype, device=cache.device)

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
        return upload(torch.tensor(rows), self.cache.device)
