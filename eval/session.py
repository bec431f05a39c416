"""One sequence of one policy, driven token by token through the engine's own runner and cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shadowkv.engine.runner import Runner
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.layout import Blocks, Layout
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.sequence import Sequence as CachedSequence
from shadowkv.kvcache.spec import KVSpec
from shadowkv.models.loader import LoadedModel


class Session:
    """A sequence on a cache of its own size.

    Args:
        loaded: the model.
        spec: the policy.
        capacity: tokens the sequence may reach.
    """

    def __init__(self, loaded: LoadedModel, spec: KVSpec, capacity: int) -> None:
        shape, parameter = loaded.config.shape, next(loaded.model.parameters())
        spec = spec.resolve(shape)
        layout = Layout(spec, shape, parameter.dtype, build_parts(spec, shape, parameter.dtype))
        need = layout.blocks(layout.pages(1, capacity))
        self.cache = KVCache(
            spec,
            shape,
            loaded.config.rope,
            slots=1,
            max_model_len=capacity,
            memory=Blocks(need.device, need.host),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self.runner = Runner(loaded.model, self.cache)
        self.sequence: CachedSequence | None = None
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self.sequence is None else int(self.cache.pool.table.length[self.sequence.slot])

    def feed(self, tokens: list[int], forks: Sequence[Session] = ()) -> Tensor:
        """Prefills the next turn's ``tokens``; returns logits [V] after the last.

        ``forks`` are new sessions of other policies that take the same first turn from this one's computation.
        """
        for session in (self, *forks):
            if session.sequence is None:
                session.sequence = session.cache.pool.allocate(len(tokens), session.capacity)
            else:
                session.cache.pool.extend(session.sequence, session.length + len(tokens), session.capacity)
        assert self.sequence is not None
        copies = [(fork.cache, [fork.sequence]) for fork in forks if fork.sequence is not None]
        run = self.runner.prefill([(self.sequence, tokens)], copies)
        with torch.inference_mode():
            while True:
                try:
                    next(run)
                except StopIteration as end:
                    return end.value[0][0]

    def step(self, token: int) -> Tensor:
        """Decodes one token; returns logits [V] of the next."""
        assert self.sequence is not None, "feed a prompt first"
        return self.runner.decode([self.sequence], [token])[0]

    def clear(self) -> None:
        """Forgets the sequence; the next ``feed`` begins a new one in the same memory."""
        if self.sequence is not None:
            self.cache.pool.release(self.sequence)
        self.sequence = None

    def figures(self) -> dict[str, float | int]:
        """Tokens that the last step attended to, and the smallest share of the keys' energy that a layer kept."""
        assert self.sequence is not None, "feed a prompt first"
        figures: dict[str, float | int] = {"attended_tokens": self.cache.spec.attended_tokens(self.length)}
        kept = self.cache.kept_energy(self.sequence)
        return figures if kept is None else {**figures, "least_kept_energy": round(float(kept.min()), 4)}

    def force(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Logits [len(tokens), V] that predict each of ``tokens`` after ``prompt``."""
        return torch.stack([self.feed(prompt), *(self.step(token) for token in tokens[:-1])])

    def greedy(self, prompt: list[int], count: int) -> Iterator[tuple[int, Tensor]]:
        """Greedy continuation: ``count`` tokens, each with the logits [V] that chose it."""
        logits = self.feed(prompt)
        for left in range(count - 1, -1, -1):
            token = int(logits.argmax())
            yield token, logits
            if left:
                logits = self.step(token)
