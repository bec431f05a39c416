"""The process of a rank other than 0: makes rank 0's calls on its own part of the model.

Rank 0 starts it as ``python -m shadowkv.engine.parallel.worker FD MEMORY``. FD is the file descriptor of its connection
to rank 0. MEMORY is that of the file with the slabs (pieces of host memory) of the host tier. The process exits when
rank 0 closes the connection.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from shadowkv.engine.child_process import ignore_stop_signals
from shadowkv.engine.execution.head_runner import HeadRunner
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.parallel.calls import CACHE, HEAD, HEAD_CACHE, RUNNER, Answer, Reader
from shadowkv.engine.parallel.ranks import HERE, rank_device
from shadowkv.engine.parallel.tiers import RankMover, join_tiers
from shadowkv.engine.startup.draft_head import open_head
from shadowkv.engine.startup.loading import current, graphs_up_to, load_engine_parts
from shadowkv.layers.group import RankFailure, open_group

POLL_SECONDS = 0.001
"""Seconds between two checks whether copies have arrived, while rank 0 waits for an answer."""

Messages = queue.SimpleQueue[list[bytes]]


class Worker:
    """The objects of this rank, on which rank 0's calls are made.

    Args:
        head: runs this rank's part of the draft head; None without one.
        mover: copies this rank's parts of cached prompts between device and host; None without tiers below the device.
    """

    def __init__(self, runner: Runner, head: HeadRunner | None = None, mover: RankMover | None = None) -> None:
        cache = runner.cache
        targets = {"worker": self, CACHE: cache, RUNNER: runner, "mover": mover}
        if head is not None:
            targets |= {HEAD_CACHE: head.cache, HEAD: head}
        self.reader = Reader(targets, cache.device)

    def run_commands(self, written: Iterable[bytes]) -> None:
        """Makes serialised calls of rank 0."""
        for call in written:
            self.reader.call(call)

    def run(self, messages: Messages, answer: Callable[[Answer], None]) -> None:
        """Makes the calls of rank 0's next message, and passes answers to ``answer``. While rank 0 waits for an answer,
        this rank waits only briefly for a message."""
        with suppress(queue.Empty):
            self.run_commands(messages.get(timeout=POLL_SECONDS if self.reader.asked else None))
        for one in self.reader.answers():
            answer(one)

    def advance(self, number: int) -> None:
        """Computes the next piece of a prefill."""
        with torch.inference_mode():
            try:
                next(self.reader.made[number])
            except StopIteration:
                del self.reader.made[number]

    def leave(self, number: int) -> None:
        """Abandons a prefill."""
        self.reader.made.pop(number).close()


def main(number: int, memory: int) -> None:
    """Runs until rank 0 closes the connection or ends, or until an error, which it reports to rank 0.

    Args:
        number: file descriptor of the connection.
        memory: file descriptor of the slabs of the host tier (``Ranks.memory``).
    """
    ignore_stop_signals()
    pipe, messages = Connection(number), Messages()
    try:
        config, rank, size, meeting = pipe.recv()
    except (OSError, EOFError):  # rank 0 ended before this rank had started
        raise SystemExit(1) from None
    reported: tuple[type[BaseException], ...] = (RankFailure, ValueError, MemoryError, OSError)
    try:
        device = rank_device(config.device, rank)
        pipe.send(HERE)
        threading.Thread(target=_listen, args=(pipe, messages), name="shadowkv-rank", daemon=True).start()
        group = open_group(rank, size, device, meeting)
        if not config.disable_custom_all_reduce:
            group.share_memory(device)
        with current(device):
            loaded, cache, _ = load_engine_parts(config, group=group, device=device)
            mover = join_tiers(config, loaded, cache, group, memory)
            runner = Runner(loaded.model, cache, graphs_up_to(config, cache))
            worker = Worker(runner, open_head(config, loaded, runner), mover)
            reported = (RankFailure,)  # any other error from here on is a bug
            while True:
                worker.run(messages, pipe.send)
    except BaseException as error:
        of_another = isinstance(error, RankFailure)
        with suppress(OSError):
            pipe.send((not of_another, str(error) if of_another else f"{type(error).__name__}: {error}"))
        if isinstance(error, reported):  # rank 0 prints it in one line
            raise SystemExit(1) from None
        raise


def _listen(pipe: Connection, messages: Messages) -> None:
    while True:
        try:
            messages.put(pipe.recv())
        except (OSError, EOFError):
            os._exit(1)  # rank 0 has ended; the main thread may hang in a collective


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
