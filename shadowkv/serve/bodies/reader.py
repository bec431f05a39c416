"""Reads bodies off the event loop: short ones on a thread, long ones in separate processes.

``json.loads`` holds the interpreter's lock from the first byte to the last, for a second at 32 MiB. Even on a thread it
would block everything else.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from threading import Event, Timer
from typing import TypeVar

from shadowkv.engine.child_process import start_process
from shadowkv.engine.process.fair_turns import FairTurns, in_thread
from shadowkv.serve.bodies.api_error import ApiError, server_stopping
from shadowkv.serve.bodies.body import B, read_body
from shadowkv.serve.bodies.parameters import unknown

T = TypeVar("T")

SHORT_BYTES = 2**18
"""Maximum size of a body that is read in this process. Parsing such a body holds the interpreter's lock for
milliseconds."""

PROCESSES = 2
"""Number of reader processes, which are started for the first long bodies. While one process reads a long body, the
other one reads the bodies of other tenants: a tenant uses at most one process."""

IDLE_SECONDS = 60.0
"""Seconds after which an idle process ends, which frees the memory that its longest body took."""

SECONDS, SECONDS_PER_MIB = 10.0, 0.25
"""Time limit for reading a body: ``SECONDS``, plus ``SECONDS_PER_MIB`` per MiB. A body of 32 MiB takes about one
second."""

MEMORY_BYTES, MEMORY_PER_BYTE = 2**29, 24
"""Memory limit of a process in bytes: ``MEMORY_BYTES``, plus ``MEMORY_PER_BYTE`` per byte of the longest allowed body.
A body of token ids takes about 12 bytes per byte."""


class BodyReader:
    """Reads bodies for one server. Its processes end with ``close``, with the server, or after ``IDLE_SECONDS`` without
    work.

    Args:
        max_body_bytes: maximum length of a body.
        seconds: time limit for reading a body. None: the limit depends on the body's length (``SECONDS_PER_MIB``).

    Attributes:
        idle: processes without work.
        working: processes that read a body.
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
        """Returns the request in a body. Tenants take turns, so that a tenant with many bodies does not hold up the
        others. Raises ApiError."""
        if len(raw) <= SHORT_BYTES:
            return await in_thread(tenant, partial(read_body, raw, model))
        return await self.apart(raw, partial(read_body, model=model), tenant)

    async def apart(self, raw: bytes | bytearray, work: Callable[[bytes], T], tenant: str = "") -> T:
        """Runs ``work`` on a body in a separate process and returns the result. ``work`` must be picklable. The process
        is killed if this call is cancelled. Raises ApiError."""
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
        """Ends the processes. Refuses bodies that are being read or that wait for their turn."""
        self._closed = True
        self._turns.drop(server_stopping())
        for process in (*self.idle, *self.working):
            process.kill()
        self._threads.shutdown()
        for process in self.idle:
            process.end()
        self.idle.clear()


class _Process:
    """One process, started for its first body, that reads one body at a time."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._killed = Event()
        self._clock: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """The process id, once the process has read something."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_ended(self) -> bool:
        """Whether the process is no longer usable."""
        return self._killed.is_set() or not self.is_running

    def read(self, raw: bytes | bytearray, work: Callable[[bytes], T], seconds: float) -> T | ApiError:
        """Returns the process's result for a body. If there is no result, kills the process and returns an ApiError
        that gives the reason."""
        if self._process is None:
            self._process, self._connection = start_process("shadowkv.serve.bodies.reader_process")
        late = Event()

        def stop() -> None:
            late.set()
            self.kill()

        timer = Timer(seconds, stop)
        timer.start()
        try:
            if self._killed.is_set():  # the process was killed while it started
                raise EOFError
            self._connection.send((self._memory, work))
            self._connection.send_bytes(raw)
            result: T | ApiError
            result, names = self._connection.recv()
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
            if self._killed.is_set():  # even if the result has just arrived: the process is about to end
                self.end()
        for name in names:
            unknown.record(name)
        return result

    def end_in(self, seconds: float, idle: list[_Process]) -> None:
        """Ends the process after ``seconds`` and removes it from ``idle``, unless ``keep`` is called first."""

        def end() -> None:
            idle.remove(self)
            self.end()

        self._clock = asyncio.get_running_loop().call_later(seconds, end)

    def keep(self) -> None:
        """Cancels ``end_in``."""
        if self._clock is not None:
            self._clock.cancel()

    def kill(self) -> None:
        """Kills the process, whatever it is doing."""
        self._killed.set()
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Kills the process and waits for its end."""
        self.kill()
        if self._process is None:
            return
        self._process.wait()
        self._connection.close()
