"""A rank other than the first: does with its part of the model what rank 0 tells it.

``python -m shadowkv.engine.parallel.worker FD``, started by rank 0, whose end of that connection it listens to: once
that is closed, this process exits.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.parallel.ranks import HERE, Command, rank_device
from shadowkv.engine.startup.loading import current, graphs_up_to, load_engine_parts
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.layers.group import RankFailure, open_group


class Worker:
    """Carries out commands: methods, by name, for what rank 0's cache and runner do."""

    def __init__(self, runner: Runner, cache: KVCache) -> None:
        self.runner, self.cache = runner, cache
        self.sequences: dict[int, CachedSequence] = {}
        self._prefills: dict[int, Generator[None, None, Any]] = {}

    def obey(self, command: Command) -> None:
        """Carries out one command."""
        name, *what = command
        getattr(self, name)(*what)

    def allocate(self, number: int, start: int, capacity: int) -> None:
        self.sequences[number] = self.cache.allocate(start, capacity)

    def extend(self, number: int, start: int, capacity: int) -> None:
        self.cache.extend(self.sequences[number], start, capacity)

    def fork(self, number: int, new: int, length: int, start: int, capacity: int) -> None:
        self.sequences[new] = self.cache.fork(self.sequences[number], length, start, capacity)

    def truncate(self, number: int, length: int) -> None:
        self.cache.truncate(self.sequences[number], length)

    def trim(self, number: int) -> None:
        self.cache.trim(self.sequences[number])

    def release(self, number: int) -> None:
        self.cache.release(self.sequences.pop(number))

    def prefill(self, name: int, work: list[tuple[int, list[int]]], scored: bool) -> None:
        found = [(self.sequences[number], tokens) for number, tokens in work]
        self._prefills[name] = self.runner.prefill(found, scored)

    def advance(self, name: int) -> None:
        with torch.inference_mode():
            try:
                next(self._prefills[name])
            except StopIteration:
                del self._prefills[name]

    def leave(self, name: int) -> None:
        self._prefills.pop(name).close()

    def prepare(self, numbers: list[int], joining: list[tuple[int, int]]) -> None:
        running = [self.sequences[number] for number in numbers]
        plan = self.runner.unprepared(running, [(self.sequences[number], tokens) for number, tokens in joining])
        assert plan is not None, "the ranks have captured different graphs"
        self.runner.prepare(plan)

    def prepare_mixed(self, number: int, tokens: int, rows: int, batch: int) -> None:
        self.runner.prepare_mixed(self.sequences[number], tokens, rows, batch)

    def prompt_logprobs(self, shape: tuple[int, ...], tokens: list[int]) -> None:
        model = self.runner.model
        hidden = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.runner.prompt_logprobs(model.group.copy_first(hidden), tokens, 0)

    def collective_rpc(self, function: Callable[..., Any], numbers: list[int], what: tuple[Any, ...]) -> None:
        self.runner.collective_rpc(function, [self.sequences[number] for number in numbers], *what)

    def decode(
        self,
        numbers: list[int],
        seeds: list[int],
        tokens: list[int],
        sources: list[int] | None,
        recorded: bool,
        joining: list[tuple[int, list[int]]],
    ) -> None:
        sequences = [self.sequences[number] for number in numbers]
        for sequence, seed in zip(sequences, seeds, strict=True):
            sequence.seed = seed
        self.runner.share_chosen(sources)
        # What is recorded is not a CUDA graph: a graph has more rows than its step, and rehearses some layers before.
        prompts = [(self.sequences[number], ids) for number, ids in joining]
        self.runner.decode(sequences, tokens, sources, nullcontext() if recorded else None, prompts)


def main(number: int) -> None:
    """Runs until rank 0 closes the connection or is gone, or until something fails, which is reported to rank 0."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # sent to a whole service or terminal: rank 0 handles them, and ends this
    pipe, commands = Connection(number), queue.SimpleQueue[list[Command]]()
    try:
        config, rank, size, meeting = pipe.recv()
    except (OSError, EOFError):  # rank 0 was gone before this one had started
        raise SystemExit(1) from None
    said: tuple[type[BaseException], ...] = (RankFailure, ValueError, MemoryError, OSError)
    try:
        device = rank_device(config.device, rank)
        pipe.send(HERE)
        threading.Thread(target=_listen, args=(pipe, commands), name="shadowkv-rank", daemon=True).start()
        group = open_group(rank, size, device, meeting)
        with current(device):
            loaded, cache, _ = load_engine_parts(config, group=group, device=device)
            worker = Worker(Runner(loaded.model, cache, graphs_up_to(config, cache)), cache)
            said = (RankFailure,)  # any other error from here on is a bug
            while True:
                for command in commands.get():
                    worker.obey(command)
    except BaseException as error:
        of_another = isinstance(error, RankFailure)
        with suppress(OSError):
            pipe.send((not of_another, str(error) if of_another else f"{type(error).__name__}: {error}"))
        if isinstance(error, said):  # in one line, by rank 0
            raise SystemExit(1) from None
        raise


def _listen(pipe: Connection, commands: queue.SimpleQueue[list[Command]]) -> None:
    while True:
        try:
            commands.put(pipe.recv())
        except (OSError, EOFError):
            os._exit(1)  # rank 0 is gone, and this one may be in the middle of collective work


if __name__ == "__main__":
    main(int(sys.argv[1]))
