"""Cache and runner of rank 0, which make the other ranks do with theirs what they do themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.outputs import TokenLogprobs
from shadowkv.engine.parallel.ranks import Ranks
from shadowkv.engine.startup.loading import graphs_up_to, load_engine_parts
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.decode.batch import DecodePlan
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.decoder import Decoder
from shadowkv.models.loader import LoadedModel

Result = TypeVar("Result")

Prefilled = tuple[Tensor, list[Tensor]]


def load_driver(config: EngineConfig, ranks: Ranks) -> tuple[LoadedModel, DriverCache, DriverRunner, list[str]]:
    """Rank 0's part of the model, its cache, the runner of both, and the lines that describe what fits; raises as
    ``load_engine_parts`` does, and RankFailure where another rank fails at it."""
    with ranks.together():
        make = partial(DriverCache, ranks)
        loaded, cache, notes = load_engine_parts(config, group=ranks.group, device=ranks.device, make=make)
    assert isinstance(cache, DriverCache)
    return loaded, cache, DriverRunner(loaded.model, cache, ranks, graphs_up_to(config, cache)), notes


class DriverCache(KVCache):
    """A cache of rank 0's heads. Sequences live equally long in the other ranks' caches, identified by numbers."""

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks, self._next, self._numbers = ranks, itertools.count(), dict[CachedSequence, int]()

    def numbers(self, sequences: Sequence[CachedSequence]) -> list[int]:
        """Numbers by which the other ranks know sequences."""
        return [self._numbers[sequence] for sequence in sequences]

    def _new(self, sequence: CachedSequence) -> int:
        self._numbers[sequence] = next(self._next)
        return self._numbers[sequence]

    def allocate(self, start: int, capacity: int) -> CachedSequence:
        sequence = super().allocate(start, capacity)
        self._ranks.tell("allocate", self._new(sequence), start, capacity)
        return sequence

    def extend(self, sequence: CachedSequence, start: int, capacity: int) -> None:
        super().extend(sequence, start, capacity)
        self._ranks.tell("extend", self._numbers[sequence], start, capacity)

    def fork(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> CachedSequence:
        forked = super().fork(sequence, length, start, capacity)
        self._ranks.tell("fork", self._numbers[sequence], self._new(forked), length, start, capacity)
        return forked

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        super().truncate(sequence, length)
        self._ranks.tell("truncate", self._numbers[sequence], length)

    def trim(self, sequence: CachedSequence) -> None:
        super().trim(sequence)
        self._ranks.tell("trim", self._numbers[sequence])

    def release(self, sequence: CachedSequence) -> None:
        super().release(sequence)
        self._ranks.tell("release", self._numbers.pop(sequence))


class DriverRunner(Runner):
    """Runs rank 0's part of the model, alongside the other ranks.

    An error in collective work leaves the others waiting: it is fatal to all of them, as RankFailure.
    """

    def __init__(self, model: Decoder, cache: DriverCache, ranks: Ranks, graphs_up_to: int | None = None) -> None:
        super().__init__(model, cache, graphs_up_to)
        self._ranks, self._of = ranks, cache
        self._names = itertools.count()
        self._forecast: tuple[list[CachedSequence], list[tuple[CachedSequence, int]]] = [], []

    def prefill(
        self, work: list[tuple[CachedSequence, list[int]]], scored: bool = False
    ) -> Generator[None, None, Prefilled]:
        name, steps, ended = next(self._names), super().prefill(work, scored), False
        numbers = self._of.numbers([sequence for sequence, _ in work])
        self._ranks.tell("prefill", name, list(zip(numbers, [tokens for _, tokens in work])), scored)
        try:
            while True:
                self._ranks.send("advance", name)
                with self._ranks.together():
                    try:
                        next(steps)
                    except StopIteration as end:
                        ended = True
                        result: Prefilled = end.value
                        return result
                yield
        finally:
            if not ended:
                steps.close()
                self._ranks.tell("leave", name)

    def unprepared(
        self, sequences: list[CachedSequence], joining: list[tuple[CachedSequence, int]]
    ) -> DecodePlan | None:
        self._forecast = sequences, joining
        return super().unprepared(sequences, joining)

    def prepare(self, plan: DecodePlan) -> None:
        sequences, joining = self._forecast
        others = self._of.numbers([sequence for sequence, _ in joining])
        counts = [tokens for _, tokens in joining]
        self._ranks.send("prepare", self._of.numbers(sequences), list(zip(others, counts)))
        with self._ranks.together():
            super().prepare(plan)

    def prepare_mixed(self, sequence: CachedSequence, tokens: int, rows: int, batch: int) -> None:
        self._ranks.send("prepare_mixed", self._of.numbers([sequence])[0], tokens, rows, batch)
        with self._ranks.together():
            super().prepare_mixed(sequence, tokens, rows, batch)

    def prompt_logprobs(self, hidden: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs | None]:
        self._ranks.send("prompt_logprobs", hidden.shape, tokens)
        with self._ranks.together():
            self.model.group.copy_first(hidden)
            return super().prompt_logprobs(hidden, tokens, count)

    def collective_rpc(self, function: Callable[..., Result], sequences: list[CachedSequence], *what: Any) -> Result:
        self._ranks.send("collective_rpc", function, self._of.numbers(sequences), what)
        with self._ranks.together():
            return super().collective_rpc(function, sequences, *what)

    def decode(
        self,
        sequences: list[CachedSequence],
        tokens: list[int],
        sources: list[int] | None = None,
        record: AbstractContextManager[Any] | None = None,
        prompts: Sequence[tuple[CachedSequence, list[int]]] = (),
    ) -> Tensor:
        seeds = [sequence.seed for sequence in sequences]
        joining = list(zip(self._of.numbers([sequence for sequence, _ in prompts]), [ids for _, ids in prompts]))
        self._ranks.send("decode", self._of.numbers(sequences), seeds, tokens, sources, record is not None, joining)
        with self._ranks.together():
            self.share_chosen(sources)
            return super().decode(sequences, tokens, sources, record, prompts)
