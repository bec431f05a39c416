"""Rank 0's cache and runner. They send their calls to the other ranks, which make the same calls on their own."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from torch import Tensor

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.parallel.ranks import Ranks
from shadowkv.engine.startup.loading import graphs_up_to, load_engine_parts
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.decoder import Decoder
from shadowkv.models.loader import LoadedModel

Prefilled = tuple[Tensor, list[Tensor]]


def load_driver(config: EngineConfig, ranks: Ranks) -> tuple[LoadedModel, DriverCache, DriverRunner, list[str]]:
    """Loads rank 0's part of the model. Returns it with its cache, its runner, and lines that describe what fits.
    Raises what ``load_engine_parts`` raises, and RankFailure if another rank fails."""
    with ranks.together():
        make = partial(DriverCache, ranks)
        loaded, cache, notes = load_engine_parts(config, group=ranks.group, device=ranks.device, make=make)
    assert isinstance(cache, DriverCache)
    return loaded, cache, DriverRunner(loaded.model, cache, ranks, graphs_up_to(config, cache)), notes


def _queued(method: str) -> Any:
    """Makes a method of ``DriverCache``. Its calls are sent to the other ranks with their next work, so no rank waits
    for another."""

    def call(self: DriverCache, *arguments: Any) -> Any:
        result = getattr(super(DriverCache, self), method)(*arguments)
        self.ranks.queue(self.ranks.writer.write("cache", method, arguments, result))
        return result

    return call


class DriverCache(KVCache):
    """The cache of rank 0's heads. The other ranks' caches have the same sequences."""

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ranks = ranks

    allocate, extend, fork = _queued("allocate"), _queued("extend"), _queued("fork")
    truncate, trim = _queued("truncate"), _queued("trim")

    def release(self, sequence: CachedSequence) -> None:
        super().release(sequence)
        self.ranks.queue(self.ranks.writer.release(sequence))


def _together(method: str) -> Any:
    """Makes a method of ``DriverRunner`` that all ranks call at the same time. An error leaves the other ranks waiting,
    so it becomes a RankFailure, which ends all ranks."""

    def call(self: DriverRunner, *arguments: Any) -> Any:
        self.ranks.send(self.ranks.writer.write("runner", method, arguments))
        with self.ranks.together():
            return getattr(super(DriverRunner, self), method)(*arguments)

    return call


class DriverRunner(Runner):
    """The runner of rank 0's part of the model. All ranks run the same steps together."""

    def __init__(self, model: Decoder, cache: KVCache, ranks: Ranks, graphs_up_to: int | None = None) -> None:
        super().__init__(model, cache, graphs_up_to)
        self.ranks = ranks

    decode, prepare = _together("decode"), _together("prepare")
    prompt_logprobs, collective_rpc = _together("prompt_logprobs"), _together("collective_rpc")

    def prefill(
        self, work: list[tuple[CachedSequence, list[int]]], scored: bool = False
    ) -> Generator[None, None, Prefilled]:
        steps, writer, ended = super().prefill(work, scored), self.ranks.writer, False
        number, written = writer.begin("runner", "prefill", (work, scored))
        self.ranks.queue(written)
        try:
            while True:
                self.ranks.send(writer.write("worker", "advance", (number,)))
                with self.ranks.together():
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
                self.ranks.queue(writer.write("worker", "leave", (number,)))
