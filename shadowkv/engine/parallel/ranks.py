"""``Ranks``: starts the processes of the other ranks, sends them calls, watches and ends them. ``Engine`` has one."""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import torch

from shadowkv.engine.child_process import GRACE_SECONDS, ending, start_process
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.held_folder import HeldFolder
from shadowkv.engine.parallel.calls import Answer, Writer
from shadowkv.engine.startup.loading import device_of
from shadowkv.layers.group import ALONE, RankFailure, check_alone, open_group
from shadowkv.prefix_cache.host import shared_file

logger = logging.getLogger(__name__)

HERE = "here"
"""Message of a rank that is about to join the process group."""

REASON_SECONDS = 2.0
"""Seconds to wait for the reason of a rank that has ended, after another rank has noticed the end."""


class Ranks:
    """The other ranks, for rank 0.

    Attributes:
        group: the process group of all ranks.
        device: rank 0's device.
        failure: why the ranks cannot go on; None while they can.
        memory: the file with the slabs (pieces of host memory) of the host tier, which all ranks map.
        writer: serialises calls for the other ranks.

    Raises ValueError if there are too few devices, RankFailure if a rank does not start.
    """

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        check_alone()
        devices = [rank_device(config.device, rank) for rank in range(size)]
        self.device, self.failure, self.group = devices[0], cast("str | None", None), ALONE
        self._on_failure: Callable[[RankFailure], None] = lambda failure: None
        self._folder, self.writer, self.memory = HeldFolder("ranks-"), Writer(), shared_file()
        self._asked, self._asking = dict[int, _Asked](), threading.Lock()
        self._closing, self._pending = False, list[bytes]()
        self._known = threading.Event()
        self._sockets, self._pipes = list[socket.socket](), list[Connection]()
        self._processes = list[subprocess.Popen[bytes]]()
        self._watching = threading.Thread(target=self._watch, name="shadowkv-ranks", daemon=True)
        meeting = f"{self._folder.path}/meeting"
        try:
            for rank in range(1, size):
                self._start(rank, (config, rank, size, meeting))
            self._await_all()
            self._watching.start()
            with self.together():
                self.group = open_group(0, size, self.device, meeting)
                if not config.disable_custom_all_reduce:
                    self.group.share_memory(self.device)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, what: tuple[Any, ...]) -> None:
        process, pipe = start_process("shadowkv.engine.parallel.worker", self.memory.fileno())
        self._processes.append(process)
        self._pipes.append(pipe)
        self._sockets.append(socket.socket(fileno=os.dup(pipe.fileno())))
        with suppress(OSError):  # _await_all detects a rank that has ended
            pipe.send(what)

    def _await_all(self) -> None:
        """Waits until every rank is about to join the process group. Raises RankFailure if one ends before. Rank 0
        joins only afterwards: if a rank is missing, joining waits for half an hour, and not even Ctrl-C can interrupt
        it."""
        left = list(self._pipes)
        while left:
            pipe = cast(Connection, multiprocessing.connection.wait(left)[0])
            left.remove(pipe)
            try:
                message = pipe.recv()
            except (OSError, EOFError):
                message = True, None
            if message != HERE:
                self.failure = self._describe_end(pipe, message[1])
                raise RankFailure(self.failure)

    def queue(self, call: bytes) -> None:
        """Queues a call of ``writer`` for the other ranks. The next ``send`` sends it."""
        self._pending.append(call)

    def send(self, call: bytes) -> None:
        """Sends the queued calls and then this one to the other ranks. Raises RankFailure if a rank has ended."""
        self._pending.append(call)
        self.flush()

    def flush(self) -> None:
        """Sends the queued calls to the other ranks, if there are any. Raises RankFailure if a rank has ended."""
        pending, self._pending = self._pending, []
        self.check()
        if not pending:
            return
        for pipe in self._pipes:
            try:
                pipe.send(pending)
            except OSError as error:
                raise RankFailure(self._reason(error)) from error

    def ask(self, target: str, method: str, arguments: tuple[Any, ...]) -> Future[list[Any]]:
        """Sends the queued calls, and then a call that the other ranks answer. Does not wait: the returned future gets
        the list of answers, in any order. It raises RankFailure if a rank has ended."""
        number, written = self.writer.ask(target, method, arguments)
        asked = _Asked(Future(), [])
        with self._asking:
            self._asked[number] = asked
        try:
            self.send(written)
        except RankFailure as error:
            self._fail_asked(error)
        return asked.future

    def _take_answer(self, answer: Answer) -> None:
        with self._asking:
            asked = self._asked.get(answer.number)
            if asked is None:
                return
            asked.answers.append(answer.result)
            if len(asked.answers) < len(self._pipes):
                return
            del self._asked[answer.number]
        asked.future.set_result(asked.answers)

    def _fail_asked(self, error: RankFailure) -> None:
        """Ends the wait for answers of ranks that have ended."""
        with self._asking:
            asked, self._asked = self._asked, {}
        for one in asked.values():
            one.future.set_exception(error)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for work that all ranks do at the same time. An error of this rank leaves the other ranks waiting,
        so it becomes a RankFailure, which ends all ranks. The RankFailure has another rank's error if that is the
        cause."""
        try:
            yield
        except (RuntimeError, AssertionError) as error:
            raise RankFailure(self._reason(error)) from error

    def _reason(self, error: Exception) -> str:
        if self._known.wait(REASON_SECONDS if isinstance(error, (RankFailure, OSError)) else 0) and self.failure:
            return self.failure
        self.failure = f"tensor-parallel rank 0 failed: {type(error).__name__}: {error}"
        logger.error("%s", self.failure, exc_info=error)
        return self.failure

    def check(self) -> None:
        """Raises RankFailure if a rank has ended. Results since then can be wrong, because a GPU that waited for the
        rank went on without it."""
        if self.failure is not None:
            raise RankFailure(self.failure)

    def when_failed(self, callback: Callable[[RankFailure], None]) -> None:
        """Registers ``callback``. It is called on a separate thread when a rank has ended."""
        self._on_failure = callback
        if self._known.is_set() and self.failure is not None:
            callback(RankFailure(self.failure))

    def _watch(self) -> None:
        """Receives answers until a rank ends or reports an error. Before ``close``, a rank ends only if something
        fails. If a rank ended because another one did not answer, that other rank is the cause, and is reported if it
        ends too."""
        left, found, seconds = list(self._pipes), None, None
        while ready := multiprocessing.connection.wait(left, seconds):
            if self._closing:
                return
            pipe = cast(Connection, ready[0])
            try:
                message = pipe.recv()
            except (OSError, EOFError):
                message = True, None
            if isinstance(message, Answer):
                self._take_answer(message)
                continue
            seconds, (is_cause, reason) = REASON_SECONDS / 2, message
            left.remove(pipe)
            found = self._describe_end(pipe, reason)
            if is_cause:
                break
        self.failure = found
        self._known.set()
        self._fail_asked(RankFailure(cast(str, found)))
        if self._closing:
            return
        logger.error("%s", self.failure)
        for process in self._processes:
            process.kill()
        self._on_failure(RankFailure(cast(str, self.failure)))
        if self.group.size > 1:
            self.group.abort()  # ends kernels that wait for the rank; returns when all CUDA graphs are freed

    def _describe_end(self, pipe: Connection, reason: str | None) -> str:
        """Describes the end of the rank at ``pipe``'s other end. ``reason`` is what the rank sent; None if nothing."""
        rank = 1 + self._pipes.index(pipe)
        if reason is not None:
            return f"tensor-parallel rank {rank} failed: {reason}"
        return f"tensor-parallel rank {rank} has ended ({ending(self._processes[rank - 1])})"

    def close(self) -> None:
        """Ends the other ranks, whatever they are doing. CUDA graphs with collectives must be freed first."""
        self._closing = True
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # a rank exits when its connection is closed
        for process in self._processes:
            if self.group.size == 1:  # the rank may not listen to its connection yet
                process.kill()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watching.is_alive() and self._watching is not threading.current_thread():
            self._watching.join(GRACE_SECONDS)
        if self.group.size > 1:
            self.group.close()
        for pipe in self._pipes:
            pipe.close()
        for one in self._sockets:
            one.close()
        self.memory.close()
        self._folder.remove()


class _Asked(NamedTuple):
    """The answers to a call that have arrived so far. When all have arrived, they are the future's result."""

    future: Future[list[Any]]
    answers: list[Any]


def rank_device(name: str, rank: int) -> torch.device:
    """The device of a rank: a GPU of its own, or the CPU for all ranks. Raises ValueError if there is no such
    device."""
    device = device_of(name)
    return device if device.type == "cpu" else device_of(f"cuda:{rank}")
