"""Rank 0's caches and runners. They send each call to the other ranks, which make the same call on their own caches and
runners."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from torch import Tensor

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.execution.head_runner import HeadRunner
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.parallel.calls import CACHE, HEAD, HEAD_CACHE, RUNNER
from shadowkv.engine.parallel.ranks import Ranks
from shadowkv.engine.startup.draft_head import open_head
from shadowkv.engine.startup.loading import graphs_up_to, load_engine_parts
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.models.decoder import Decoder
from shadowkv.models.loader import LoadedModel

Prefilled = tuple[Tensor, list[Tensor]]


def load_driver(
    config: EngineConfig, ranks: Ranks
) -> tuple[LoadedModel, DriverCache, DriverRunner, DriverHead | None, list[str]]:
    """Loads rank 0's part of the model. Returns it with its cache, its runner, the runner of its draft head if there is
    one, and the lines of ``load_engine_parts``. Raises what ``load_engine_parts`` raises, and RankFailure if another
    rank fails."""
    with ranks.together():
        make = partial(DriverCache, ranks, CACHE)
        loaded, cache, notes = load_engine_parts(config, group=ranks.group, device=ranks.device, make=make)
        assert isinstance(cache, DriverCache)
        runner = DriverRunner(loaded.model, cache, ranks, graphs_up_to(config, cache))
        make_cache, make_head = partial(DriverCache, ranks, HEAD_CACHE), partial(DriverHead, ranks)
        head = open_head(config, loaded, runner, make_cache=make_cache, make=make_head)
    assert head is None or isinstance(head, DriverHead)
    return loaded, cache, runner, head, notes


def _queued(method: str) -> Any:
    """Makes a method of ``DriverCache``. Its calls are queued, and sent to the other ranks with the next message. So no
    rank waits for another."""

    def call(self: DriverCache, *arguments: Any) -> Any:
        result = getattr(super(DriverCache, self), method)(*arguments)
        self.ranks.queue(self.ranks.writer.write(self.target, method, arguments, result))
        return result

    return call


class DriverCache(KVCache):
    """The cache of rank 0's heads. The other ranks' caches have the same sequences. ``target`` is the cache's name in
    calls."""

    def __init__(self, ranks: Ranks, target: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ranks, self.target = ranks, target

    allocate, extend, fork = _queued("allocate"), _queued("extend"), _queued("fork")
    truncate, trim = _queued("truncate"), _queued("trim")

    def release(self, sequence: CachedSequence) -> None:
        super().release(sequence)
        self.ranks.queue(self.ranks.writer.release(self.target, sequence))


def _together(kind: type[Runner], target: str, method: str) -> Any:
    """Makes a method of ``DriverRunner`` or ``DriverHead`` that all ranks call at the same time. It calls the method of
    the base class ``kind``. ``target`` is the runner's name in calls. An error leaves the other ranks waiting, so it
    becomes a RankFailure, which ends all ranks."""

    def call(self: DriverRunner | DriverHead, *arguments: Any) -> Any:
        self.ranks.send(self.ranks.writer.write(target, method, arguments))
        with self.ranks.together():
            return getattr(kind, method)(self, *arguments)

    return call


class DriverRunner(Runner):
    """The runner of rank 0's part of the model. All ranks run the same steps together."""

    def __init__(self, model: Decoder, cache: KVCache, ranks: Ranks, graphs_up_to: int | None = None) -> None:
        super().__init__(model, cache, graphs_up_to)
        self.ranks = ranks

    decode, prepare, prompt_logprobs, collective_rpc = (
        _together(Runner, RUNNER, method) for method in ("decode", "prepare", "prompt_logprobs", "collective_rpc")
    )

    def prefill(
        self, work: list[tuple[CachedSequence, list[int]]], scored: bool = False
    ) -> Generator[None, None, Prefilled]:
        steps, writer, ended = super().prefill(work, scored), self.ranks.writer, False
        number, written = writer.begin(RUNNER, "prefill", (work, scored))
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


class DriverHead(HeadRunner):
    """The runner of rank 0's part of the draft head."""

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(*args)
        self.ranks = ranks

    begin, keep, read, draft, prepare = (
        _together(HeadRunner, HEAD, method) for method in ("begin", "keep", "read", "draft", "prepare")
    )
