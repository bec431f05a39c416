"""One sequence of one policy, driven token by token through the engine's own runner and cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shadowkv.engine.execution.runner import Runner
from shadowkv.eval.running.caches import figures, open_cache, prefill
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.loader import LoadedModel


class Session:
    """A sequence on a cache of its own size.

    Args:
        loaded: the model.
        spec: the policy.
        capacity: tokens the sequence may reach.
    """

    def __init__(self, loaded: LoadedModel, spec: KVSpec, capacity: int) -> None:
        self.cache = open_cache(loaded, spec, capacity)
        self.runner = Runner(loaded.model, self.cache)
        self.sequence: CachedSequence | None = None
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self.sequence is None else self.sequence.length

    def feed(self, tokens: list[int]) -> Tensor:
        """Prefills the next turn's ``tokens``; returns logits [V] after the last."""
        if self.sequence is None:
            self.sequence = self.cache.allocate(len(tokens), self.capacity)
        else:
            self.cache.extend(self.sequence, self.length + len(tokens), self.capacity)
        return prefill(self.runner.model, self.cache, [(self.sequence, tokens)])[0]

    def step(self, token: int) -> Tensor:
        """Decodes one token; returns logits [V] of the next."""
        assert self.sequence is not None, "feed a prompt first"
        return self.runner.decode([self.sequence], [token])[0]

    def figures(self) -> dict[str, float | int]:
        """Tokens that the last step attended to, and the smallest share of the keys' energy that a layer kept."""
        assert self.sequence is not None, "feed a prompt first"
        return figures(self.cache, self.sequence)

    def force(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Logits [len(tokens), V] that predict each of ``tokens`` after ``prompt``."""
        return self.follow(self.feed(prompt), tokens)

    def follow(self, logits: Tensor, tokens: list[int]) -> Tensor:
        """The same of a sequence that is there: ``logits`` [V] predict the first."""
        return torch.stack([logits, *(self.step(token) for token in tokens[:-1])])

    def greedy(self, prompt: list[int], count: int) -> Iterator[tuple[int, Tensor]]:
        """Greedy continuation: ``count`` tokens, each with the logits [V] that chose it."""
        return self.answer(self.feed(prompt), count)

    def answer(self, logits: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
        """The same of a sequence that is there: ``logits`` [V] choose the first."""
        for left in range(count - 1, -1, -1):
            token = int(logits.argmax())
            yield token, logits
            if left:
                logits = self.step(token)
