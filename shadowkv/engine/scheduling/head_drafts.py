"""``HeadDrafts``: a layer of the checkpoint drafts tokens (multi-token prediction, ``DraftHead``). ``DecodeSteps`` uses
it.

A row of the head is computed from the model's hidden state of a token, and from the token that follows it. When a
prompt is computed, rows of its last new tokens are appended to the request's own sequence in the head's cache. The
hidden states of each step are kept. When the next draft begins, the rows of these states are appended too. If more
steps pass without a draft than states are kept, the oldest states are lost, and the head's sequence lacks their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.engine.execution.head_runner import HeadRunner
from shadowkv.engine.request import Request
from shadowkv.engine.scheduling.model_drafts import ModelDrafts
from shadowkv.engine.scheduling.scheduler import Scheduler
from shadowkv.engine.speculation.config import SpeculativeConfig
from shadowkv.kvcache.sequences.sequence import CachedSequence

HEAD_SHARE = 0.1
"""Assumed time of a draft step, which has one layer, as a share of a step of the model."""


@dataclass(eq=False)
class _Context:
    """What the head has stored of a request. Tokens are numbered within the answer; the prompt's last token is -1.

    Attributes:
        sequence: the head's sequence.
        first, stop: hidden states are kept of the tokens from ``first`` to before ``stop``. The last of these tokens
            can be wrong drafted tokens.
        read: number of the first token whose row is not in ``sequence`` yet.
        rows: number of rows in ``sequence``, without those of draft steps.
    """

    sequence: CachedSequence
    first: int
    stop: int
    read: int
    rows: int

    def keep(self, token: int, count: int, kept: int) -> list[int]:
        """Records that a step has computed the hidden states of ``count`` tokens, from ``token`` on. Returns the places
        in which to keep them. ``kept`` states of each sequence are kept."""
        if token > self.stop:
            self.first = token
        self.stop = token + count
        self.first = max(self.first, self.stop - kept)
        return self.places(token, self.stop, kept)

    def places(self, start: int, stop: int, kept: int) -> list[int]:
        """The places in which the states of the tokens from ``start`` to before ``stop`` are kept."""
        return [self.sequence.slot * kept + token % kept for token in range(start, stop)]


class HeadDrafts(ModelDrafts):
    """Drafts with the draft head.

    Args:
        head: runs the draft head.
        scheduler: knows the running requests. The head's sequences of all other requests are released.
        kept: number of hidden states that are kept of each sequence.
    """

    def __init__(
        self, config: SpeculativeConfig, max_rows: int, head: HeadRunner, scheduler: Scheduler, kept: int
    ) -> None:
        super().__init__(config, max_rows, head, HEAD_SHARE)
        self._head, self._scheduler, self._kept = head, scheduler, kept
        self._contexts: dict[Request, _Context] = {}

    def prompted(self, requests: Sequence[Request]) -> None:
        """Appends rows of the prompts to new sequences of the head. If memory is short, nothing is appended, and the
        context of these requests begins with their answers."""
        self._release_ended()
        sequences, following, places = list[CachedSequence](), list[list[int]](), list[int]()
        for request in requests:
            first = max(request.cached_tokens, len(request.prompt_token_ids) - self._head.window)
            following.append(request.prompt_token_ids[first + 1 :])
            context = self._context(request, -1, len(following[-1]))
            places += context.keep(-1, 1, self._kept)
            sequences.append(context.sequence)
        try:
            self._head.begin(sequences, following, places)
        except torch.OutOfMemoryError:
            for request in requests:
                self._head.cache.release(self._contexts.pop(request).sequence)

    def _context(self, request: Request, token: int, rows: int) -> _Context:
        """Makes the context of a request, which begins with the hidden state of ``token``. ``rows`` rows are appended
        before."""
        sequence = self._head.cache.allocate(rows, self._head.cache.max_model_len)
        context = self._contexts[request] = _Context(sequence, token, token, token, rows)
        return context

    def _release_ended(self) -> None:
        """Releases the sequences of requests that do not run any more."""
        running = {running.request for running in self._scheduler.running}
        for request in [request for request in self._contexts if request not in running]:
            self._head.cache.release(self._contexts.pop(request).sequence)

    def computed(self, requests: Sequence[Request], newest: Sequence[int], rows: Sequence[int]) -> None:
        self._release_ended()
        places = list[int]()
        for request, token, count in zip(requests, newest, rows, strict=True):
            context = self._contexts.get(request) or self._context(request, token, 0)
            places += context.keep(token, count, self._kept)
        self._head.keep(places)

    def _can_draft(self, requests: Sequence[Request], sequences: Sequence[CachedSequence]) -> list[bool]:
        """Returns, for each request, whether the hidden state of the token before its newest token is kept."""
        contexts = ((request, self._contexts.get(request)) for request in requests)
        return [
            context is not None and context.stop >= len(request.output_token_ids) - 1 for request, context in contexts
        ]

    def _logits(
        self, place: int, requests: Sequence[Request], sequences: Sequence[CachedSequence], sources: list[int]
    ) -> Tensor:
        contexts = [self._contexts[request] for request in requests]
        own = [context.sequence for context in contexts]
        if place:
            return self._head.draft(own, sources)
        following, places = list[list[int]](), list[int]()
        for request, context in zip(requests, contexts, strict=True):
            stop = len(request.output_token_ids) - 1
            start = min(max(context.read, context.first), stop - 1)
            if start < context.read:  # the step that verifies the previous draft has failed
                context.read, context.rows = start, context.rows - (context.read - start)
                self._head.cache.truncate(context.sequence, context.rows)
            following.append(request.output_token_ids[start + 1 : stop + 1])
            places += context.places(start, stop, self._kept)
        logits = self._head.read(own, following, places)
        for request, context, tokens in zip(requests, contexts, following, strict=True):
            context.read, context.rows = len(request.output_token_ids) - 1, context.rows + len(tokens)
        return logits

    def _undo(self, requests: Sequence[Request], sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> None:
        for context in map(self._contexts.get, requests):
            if context is not None and context.sequence.length > context.rows:
                self._head.cache.truncate(context.sequence, context.rows)
