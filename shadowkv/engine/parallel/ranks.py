"""The processes of the other ranks: started, given commands, watched and ended."""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from shadowkv.engine.child_process import GRACE_SECONDS, ending, start_process
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.held_folder import HeldFolder
from shadowkv.engine.parallel.calls import Writer
from shadowkv.engine.startup.loading import device_of
from shadowkv.layers.group import ALONE, RankFailure, check_alone, open_group
from shadowkv.wording import SettingsError

logger = logging.getLogger(__name__)

HERE = "here"
"""Sent by a rank that is about to meet the others."""

REASON_SECONDS = 2.0
"""How long a rank's reason for ending may take to arrive, once another rank notices the end."""


class Ranks:
    """The other ranks of a model that this process is rank 0 of.

    Attributes:
        group: the group that all of them compute in.
        device: rank 0's.
        failure: why they cannot go on; None while they can.
        writer: writes calls for them.

    Raises ValueError where the devices are missing, and RankFailure where a rank does not start.
    """

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        check_alone()
        if config.kv_offload_gib or config.kv_disk_dir:
            settings = ("kv_offload_gib", "kv_disk_dir", "tensor_parallel_size")
            reason = "kv_offload_gib and kv_disk_dir take tensor_parallel_size=1: prefixes stay on the devices"
            raise SettingsError(reason, settings)
        devices = [rank_device(config.device, rank) for rank in range(size)]
        self.device, self.failure, self.group = devices[0], cast("str | None", None), ALONE
        self._on_failure: Callable[[RankFailure], None] = lambda failure: None
        self._folder, self.writer = HeldFolder("ranks-"), Writer()
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
        process, pipe = start_process("shadowkv.engine.parallel.worker")
        self._processes.append(process)
        self._pipes.append(pipe)
        self._sockets.append(socket.socket(fileno=os.dup(pipe.fileno())))
        with suppress(OSError):  # one that is gone already is detected where it is waited for
            pipe.send(what)

    def _await_all(self) -> None:
        """Waits until every rank is about to meet the others; raises RankFailure where one ends before. The meeting
        itself could not be interrupted for half an hour, not even by Ctrl-C."""
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
        """Queues a call that ``writer`` has written, for the other ranks, to whom it goes with the next ``send``."""
        self._pending.append(call)

    def send(self, call: bytes) -> None:
        """Sends the other ranks a call, after those that are queued; raises RankFailure where they cannot make it."""
        self._pending.append(call)
        pending, self._pending = self._pending, []
        self.check()
        for pipe in self._pipes:
            try:
                pipe.send(pending)
            except OSError as error:
                raise RankFailure(self._reason(error)) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """For what all ranks do at the same time. An error of this one leaves the others waiting: it is fatal to all of
        them, as RankFailure where another one's error is the cause or this one has none to report."""
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
        """Raises RankFailure where one has ended. What was computed since may be wrong: a GPU that waited for that rank
        went on without it."""
        if self.failure is not None:
            raise RankFailure(self.failure)

    def when_failed(self, callback: Callable[[RankFailure], None]) -> None:
        """Calls ``callback``, on a separate thread, when one of the ranks has ended."""
        self._on_failure = callback
        if self._known.is_set() and self.failure is not None:
            callback(RankFailure(self.failure))

    def _watch(self) -> None:
        """Waits until a rank says why it ends, or just ends, which none does before it is asked to. One that ends
        because another did not answer is the cause only if no other ends."""
        left, found, seconds = list(self._pipes), None, None
        while ready := multiprocessing.connection.wait(left, seconds):
            if self._closing:
                return
            pipe = cast(Connection, ready[0])
            seconds = REASON_SECONDS / 2
            left.remove(pipe)
            try:
                is_cause, reason = pipe.recv()
            except (OSError, EOFError):
                is_cause, reason = True, None
            found = self._describe_end(pipe, reason)
            if is_cause:
                break
        self.failure = found
        self._known.set()
        if self._closing:
            return
        logger.error("%s", self.failure)
        for process in self._processes:
            process.kill()
        self._on_failure(RankFailure(cast(str, self.failure)))
        if self.group.size > 1:
            self.group.abort()  # ends what waits for that rank on the GPU; this returns once CUDA graphs are gone

    def _describe_end(self, pipe: Connection, reason: str | None) -> str:
        """What happened to the rank at the other end, which may have given a ``reason``."""
        rank = 1 + self._pipes.index(pipe)
        if reason is not None:
            return f"tensor-parallel rank {rank} failed: {reason}"
        return f"tensor-parallel rank {rank} has ended ({ending(self._processes[rank - 1])})"

    def close(self) -> None:
        """Ends the other ranks, whatever they are doing. CUDA graphs of collective work must be gone before."""
        self._closing = True
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # they exit when they see that
        for process in self._processes:
            if self.group.size == 1:  # it may not have reached the point where it looks
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
        self._folder.remove()


def rank_device(name: str, rank: int) -> torch.device:
    """The device of a rank: a GPU each, or all of them the CPU; raises ValueError where it is not there."""
    device = device_of(name)
    return device if device.type == "cpu" else device_of(f"cuda:{rank}")
