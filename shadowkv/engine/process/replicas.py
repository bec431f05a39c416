"""``ReplicaClient``: a client of several engines of one model (data parallelism), used like that of one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import numpy as np

from shadowkv.engine.engine import EngineStats
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.process.client import Answers, ClientRequest, EngineClient, Observe
from shadowkv.engine.process.heartbeat import BEAT_SECONDS
from shadowkv.engine.process.prefix_table import MAX_BLOCKS, PrefixTable, margin_of
from shadowkv.engine.request import EngineDead, EngineState, EngineStopped
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.prefix_cache.page_hashes import origin, page_hashes
from shadowkv.prefix_cache.prefix_cache import PrefixSegment
from shadowkv.prefix_cache.protocol import Saved
from shadowkv.wording import counted

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARED = ("used_bytes", "total_bytes", "pinned_bytes", "files", "other_files")
"""Figures of the tier ``disk`` that are of the whole directory."""

ANY_MODEL = ""
"""Key digest of the page hashes here: all prompts are of one model."""


class ReplicaClient(EngineClient):
    """Sends each request to one of several engines, which ``PrefixTable`` chooses.

    An engine that is stuck gets no requests while another one is not. An engine that dies gets no more requests. Those
    of its requests that have no token yet go to another engine, once, and the others end with its error. This client is
    dead when all engines are.

    Args:
        replicas: a client of each engine.
        table: makes the table that chooses engines, from its margin.
    """

    def __init__(self, replicas: Sequence[EngineClient], table: Callable[[int], PrefixTable] = PrefixTable) -> None:
        # Every engine can serve what the one with the shortest limit can: their GPUs may have had different room.
        least = min(replicas, key=lambda replica: replica.max_model_len)
        super().__init__(least.facts, least.tokenizer, least.folder)
        self._replicas = tuple(replicas)
        self.max_num_seqs = sum(replica.max_num_seqs for replica in replicas)
        self.max_queued_seqs = sum(replica.max_queued_seqs for replica in replicas)
        self.max_concurrency = sum(replica.max_concurrency for replica in replicas)
        self._table = table(margin_of(least.max_num_seqs))
        for replica in replicas:
            replica.name, replica._numbers = self.name, self._numbers  # by a request's id its outputs find their way
            replica.watch, replica.hand_on = self._watch, self._hand_on

    def describe(self) -> list[str]:
        return [*super().describe(), f"{counted(len(self._replicas), 'engine')} as above (data parallelism)"]

    @property
    def engines(self) -> Sequence[EngineClient]:
        return self._replicas

    @property
    def is_alive(self) -> bool:
        return any(replica.is_alive for replica in self._replicas)

    @property
    def serves(self) -> bool:
        return any(replica.serves for replica in self._replicas)

    @property
    def state(self) -> EngineState:
        """The best of the engines' states."""
        states = {replica.state for replica in self._replicas}
        return "ok" if "ok" in states else "stuck" if "stuck" in states else "dead"

    def end(self) -> EngineDead:
        errors = [replica.end() for replica in self._replicas]
        return next((error for error in errors if isinstance(error, EngineStopped)), errors[0])

    def connect(self) -> None:
        for replica in self._replicas:
            replica.connect()

    def disconnect(self) -> None:
        for replica in self._replicas:
            replica.disconnect()

    # -- requests ---------------------------------------------------------------------------------------------------

    def request(
        self, prompt_token_ids: list[int], params: SamplingParams, tenant: str = "", priority: int = 0
    ) -> ClientRequest:
        request = super().request(prompt_token_ids, params, tenant, priority)
        if self._shareable(request):
            full_pages = np.frombuffer(request.packed, np.int32)[: len(prompt_token_ids) // PAGE * PAGE]
            pages = page_hashes(origin(ANY_MODEL, params.cache_salt), full_pages)
            request.prefix = tuple(link for _, link in islice(pages, MAX_BLOCKS))
        return request

    def begin(self, request: ClientRequest, answers: Answers, save: tuple[int, str] | None = None) -> None:
        if save is not None:
            request.moved = True  # what was asked with it is lost with the engine
        self._chosen(request.prefix).begin(request, answers, save)

    def _chosen(self, prefix: Sequence[str]) -> EngineClient:
        """Chooses an engine, a stuck one only if all are. Raises EngineDead if all are dead or are being stopped."""
        running = {str(number): replica for number, replica in enumerate(self._replicas) if replica.serves}
        if not running:
            raise self.end()
        running = {name: replica for name, replica in running.items() if replica.state == "ok"} or running
        return running[self._table.choose(prefix, {name: replica.in_flight for name, replica in running.items()})]

    def _hand_on(self, request: ClientRequest, answers: Answers) -> bool:
        # A request that is moved a second time may be what the engines die of.
        if request.moved or request.request_id in answers.begun or not self.serves:
            return False
        if request.engine is not None and request.engine.stopping:
            return False
        request.moved = True
        tokens = counted(len(request.prompt_token_ids), "token")
        logger.warning("request %s (%s) is sent to another engine", request.log_id, tokens)
        self.begin(request, answers)
        return True

    def _watch(self, outputs: Sequence[TokenOutput]) -> None:
        self.watch(outputs)

    async def compile_grammar(self, rules: str, one_line: bool = False, tenant: str = "") -> None:
        """Compiles in all engines, since any of them may get the request."""
        await self._of_all(lambda replica: replica.compile_grammar(rules, one_line, tenant))

    # -- statistics and the prefix cache ----------------------------------------------------------------------------

    async def stats(self, usage: bool = False) -> EngineStats:
        """Returns the sums of the statistics of the engines that are alive, their mean ``usage``, and the longest
        ``step_seconds``. Of the directory that all engines share, each counts all files: the largest figures count.
        Raises EngineDead if none is alive."""
        parts = await self._of_all(lambda replica: replica.stats(usage), in_time=True)
        total: EngineStats = together(parts)
        if disks := [part.prefixes["disk"] for part in parts if "disk" in part.prefixes]:
            shared = {name: max(getattr(disk, name) for disk in disks) for name in SHARED}
            total.prefixes["disk"] = replace(total.prefixes["disk"], **shared)
        usages = [part.usage for part in parts if part.usage is not None]
        longest = max(part.step_seconds for part in parts)
        return replace(total, usage=fmean(usages) if usages else None, step_seconds=longest)

    async def segments(self, most: int) -> tuple[list[PrefixSegment], int]:
        parts = await self._of_all(lambda replica: replica.segments(most))
        return [segment for segments, _ in parts for segment in segments][:most], sum(count for _, count in parts)

    async def save(self, name: str, request: ClientRequest, observe: Observe = lambda: nullcontext()) -> Saved:
        return await self._chosen(request.prefix).save(name, request, observe)

    async def restore(self, name: str) -> Saved:
        """Reads the prompt into the host memory of every engine, since any of them may get the next request."""
        return (await self._of_all(lambda replica: replica.restore(name)))[0]

    async def hand_over(self, request: ClientRequest) -> tuple[str, ...]:
        assert request.engine is not None, "the request was not served"
        return await request.engine.hand_over(request)

    async def expect(self, names: tuple[str, ...], tokens: int) -> bool:
        return all(await self._of_all(lambda replica: replica.expect(names, tokens)))

    async def _of_all(self, ask: Callable[[EngineClient], Coroutine[Any, Any, T]], in_time: bool = False) -> list[T]:
        """Returns the answers of the engines that are alive and stay so. Once an engine has answered, those that are
        stuck are not waited for, unless ``ask`` ends in time for them, too (``in_time``). Raises EngineDead if there
        are no answers, and an engine's other errors."""
        asked = {asyncio.create_task(ask(replica)): replica for replica in self._replicas if replica.is_alive}
        waiting = set(asked)
        try:
            while waiting:
                answered = any(one.exception() is None for one in asked.keys() - waiting)
                if answered and not in_time and all(asked[one].state == "stuck" for one in waiting):
                    break
                _, waiting = await asyncio.wait(waiting, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        answers = [one for one in asked if one not in waiting]
        errors = [error for one in answers if (error := one.exception()) is not None]
        for error in errors:
            if not isinstance(error, EngineDead) or len(errors) == len(answers):
                raise error
        if not answers:
            raise self.end()
        return [one.result() for one in answers if one.exception() is None]


def together(parts: Iterable[Any]) -> Any:
    """Adds values of one type: numbers, and dataclasses, structs, dictionaries and lists of numbers, entry by entry.
    Missing entries and None count as nothing."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    first = given[0]
    names: Sequence[str] = ()
    if isinstance(first, msgspec.Struct):
        names = first.__struct_fields__
    elif is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
    if names:
        return type(first)(**{name: together(getattr(part, name) for part in given) for name in names})
    if isinstance(first, dict):
        return {name: together(part.get(name) for part in given) for name in dict.fromkeys(n for p in given for n in p)}
    if isinstance(first, list):
        return [together(values) for values in zip(*given, strict=True)]
    return sum(given)
