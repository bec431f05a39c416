"""Reads bodies off the event loop: short ones on a thread, long ones in separate processes.

``json.loads`` holds the interpreter's lock from the first byte to the last, a second for 32 MiB: even on a thread it
would stop everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Timer
from typing import TypeVar

from shadowkv.engine.process.fair_turns import FairTurns, in_thread
from shadowkv.serve.bodies.api_error import ApiError, server_stopping
from shadowkv.serve.bodies.body import Body, read_body
from shadowkv.serve.bodies.parameters import unknown
from shadowkv.serve.bodies.reader_process import read_frame, write_frame

B = TypeVar("B", bound=Body)
T = TypeVar("T")

SHORT_BYTES = 2**18
"""Longest body that is read in this process: it holds the interpreter's lock for milliseconds."""

PROCESSES = 2
"""Started for the first long bodies: while one body takes long, the other process serves the rest, of which one tenant
has at most one."""

IDLE_SECONDS = 60.0
"""After which a process without work ends, and what it has taken for the longest body is free."""

SECONDS, SECONDS_PER_MIB = 10.0, 0.25
"""Seconds that reading may take; a body of 32 MiB takes about one."""

MEMORY_BYTES, MEMORY_PER_BYTE = 2**29, 24
"""Bytes that a process may use, plus bytes per byte of the longest body; a body of token ids takes about 12."""


class BodyReader:
    """Reads bodies for one server; its processes end with ``close``, with the server, or when there is nothing to read.

    Args:
        max_body_bytes: length of the longest body that will come.
        seconds: time that reading may take; None is the limit for JSON bodies, which depends on their length.

    Attributes:
        idle: its processes without work.
        working: those that read a body.
    """

    def __init__(self, max_body_bytes: int, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._turns = FairTurns(PROCESSES)
        self._memory = MEMORY_BYTES + MEMORY_PER_BYTE * max_body_bytes
        self._threads = ThreadPoolExecutor(PROCESSES, "shadowkv-body")
        self.idle: list[_Process] = []
        self.working: set[_Process] = set()
        self._closed = False

    async def read(self, raw: bytes | bytearray, model: type[B], tenant: str = "") -> B:
        """The request in a body; long ones of each tenant take turns. Raises ApiError."""
        if len(raw) <= SHORT_BYTES:
            return await in_thread(tenant, partial(read_body, raw, model))
        return await self.apart(raw, partial(read_body, model=model), tenant)

    async def apart(self, raw: bytes | bytearray, work: Callable[[bytes], T], tenant: str = "") -> T:
        """What ``work``, which can be pickled, makes of a body in a separate process, which is killed where this is
        cancelled; raises ApiError."""
        async with self._turns.of(tenant):
            if self._closed:
                raise server_stopping()
            seconds = SECONDS + SECONDS_PER_MIB * len(raw) / 2**20 if self._seconds is None else self._seconds
            process = self.idle.pop() if self.idle else _Process(self._memory)
            process.keep()
            self.working.add(process)
            reading = asyncio.get_running_loop().run_in_executor(self._threads, process.read, raw, work, seconds)
            try:
                result = await asyncio.shield(reading)
            except asyncio.CancelledError:
                process.kill()
                await asyncio.wait((reading,))
                raise
            finally:
                self.working.discard(process)
                if not process.has_ended:
                    self.idle.append(process)
                    process.end_in(IDLE_SECONDS, self.idle)
        if isinstance(result, ApiError):
            raise result
        return result

    def close(self) -> None:
        """Ends the processes; bodies that are being read, or would be, are refused."""
        self._closed = True
        self._turns.drop(server_stopping())
        for process in (*self.idle, *self.working):
            process.kill()
        self._threads.shutdown()
        for process in self.idle:
            process.end()
        self.idle.clear()


class _Process:
    """One process, which reads one body at a time and is started for the first."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = Event()
        self._clock: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """Its process id, once it has read something."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_ended(self) -> bool:
        """Whether it is no longer usable."""
        return self._killed.is_set() or not self.is_running

    def read(self, raw: bytes | bytearray, work: Callable[[bytes], T], seconds: float) -> T | ApiError:
        """What the process made of a body; if it made nothing, an ApiError of our own, and the process is ended."""
        if self._process is None:
            self._process = self._started()
        assert self._process.stdin is not None and self._process.stdout is not None
        late = Event()

        def stop() -> None:
            late.set()
            self.kill()

        timer = Timer(seconds, stop)
        timer.start()
        try:
            if self._killed.is_set():  # while it started
                raise EOFError
            write_frame(self._process.stdin, pickle.dumps(work))
            write_frame(self._process.stdin, raw)
            result: T | ApiError
            result, names = pickle.loads(read_frame(self._process.stdout))
        except (EOFError, OSError):
            was_killed = self._killed.is_set()
            self.end()
            if late.is_set():
                reason = f"reading this body of {len(raw)} bytes took more than {seconds:.0f} seconds; send less"
                return ApiError(reason, status=413, code="body_too_large")
            if was_killed:
                return server_stopping()
            reason = f"the process that was reading this body of {len(raw)} bytes has died; send less, or try again"
            return ApiError(reason, status=503, code="body_not_read")
        finally:
            timer.cancel()
            timer.join()
            if self._killed.is_set():  # even if the answer came just in time: the process is about to end
                self.end()
        for name in names:
            unknown.tell(name)
        return result

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "shadowkv.serve.bodies.reader_process", str(self._memory)]
        # Modules are found where this process finds them; a terminal's signals are for the server alone.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    def end_in(self, seconds: float, idle: list[_Process]) -> None:
        """Has the process end after a while, and leave the list, unless it is kept by then."""

        def end() -> None:
            idle.remove(self)
            self.end()

        self._clock = asyncio.get_running_loop().call_later(seconds, end)

    def keep(self) -> None:
        """Has it not end after all."""
        if self._clock is not None:
            self._clock.cancel()

    def kill(self) -> None:
        """Makes the process end at once, whatever it is doing."""
        self._killed.set()
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Ends the process and waits for its end."""
        self.kill()
        if self._process is None:
            return
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what remained to be written
                pipe.close()
