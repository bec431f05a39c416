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
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Timer
from typing import TypeVar

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.body import Body, read_body
from shadowkv.serve.bodies.parameters import unknown
from shadowkv.serve.bodies.reader_process import read_frame, write_frame

B = TypeVar("B", bound=Body)
T = TypeVar("T")

SHORT_BYTES = 2**18
"""Longest body that is read in this process: it holds the interpreter's lock for milliseconds."""

PROCESSES = 2
"""Started for the first long bodies: while one body takes long, the other process serves the rest, of which one API key
has at most one where there are several."""

SECONDS, SECONDS_PER_MIB = 10.0, 0.25
"""Seconds that reading may take; a body of 32 MiB takes about one."""

MEMORY_BYTES, MEMORY_PER_BYTE = 2**29, 24
"""Bytes that a process may use, plus bytes per byte of the longest body; a body of token ids takes about 12."""


class BodyReader:
    """Reads bodies for one server; its processes end with ``close``, or with the server.

    Args:
        max_body_bytes: length of the longest body that will come.
        per_key: long bodies of one API key that may be read at once; the others of that key wait, and nobody else.
        seconds: time that reading may take; None is the limit for JSON bodies, which depends on their length.

    Attributes:
        idle: its processes without work.
    """

    def __init__(self, max_body_bytes: int, per_key: int = PROCESSES, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._turns: defaultdict[str | None, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(per_key))
        self._memory = MEMORY_BYTES + MEMORY_PER_BYTE * max_body_bytes
        self._threads = ThreadPoolExecutor(PROCESSES, "shadowkv-body")  # at most this many processes work at once
        self.idle: list[_Process] = []
        self._working: set[_Process] = set()
        self._closed = False

    async def read(self, raw: bytes, model: type[B], key: str | None = None) -> B:
        """The request in a body that came with ``key``; raises ApiError."""
        if len(raw) <= SHORT_BYTES:
            return await asyncio.to_thread(read_body, raw, model)
        return await self.apart(raw, partial(read_body, model=model), key)

    async def apart(self, raw: bytes, work: Callable[[bytes], T], key: str | None = None) -> T:
        """What ``work``, which can be pickled, makes of a body in a separate process; raises ApiError."""
        async with self._turns[key]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._apart, raw, work)

    def close(self) -> None:
        """Ends the processes; bodies being read are refused."""
        self._closed = True
        for process in [*self.idle, *self._working]:
            process.end()
        self._threads.shutdown(cancel_futures=True)

    def _apart(self, raw: bytes, work: Callable[[bytes], T]) -> T:
        seconds = SECONDS + SECONDS_PER_MIB * len(raw) / 2**20 if self._seconds is None else self._seconds
        try:
            process = self.idle.pop()
        except IndexError:  # not checked beforehand: another thread may take the last one
            process = _Process(self._memory)
        self._working.add(process)
        try:
            result = process.read(raw, work, seconds)
        finally:
            self._working.discard(process)
            if self._closed or process.has_ended:
                process.end()
            else:
                self.idle.append(process)
        if isinstance(result, ApiError):
            raise result
        return result


class _Process:
    """One process, which reads one body at a time."""

    def __init__(self, memory: int) -> None:
        command = [sys.executable, "-m", "shadowkv.serve.bodies.reader_process", str(memory)]
        # Modules are found where this process finds them; a terminal's signals are for the server alone.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is no longer usable."""
        return self._process.poll() is not None

    def read(self, raw: bytes, work: Callable[[bytes], T], seconds: float) -> T | ApiError:
        """What the process made of a body; if it made nothing, an ApiError of our own, and the process is ended."""
        late = Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = Timer(seconds, stop)
        timer.start()
        try:
            write_frame(self._stdin, pickle.dumps(work))
            write_frame(self._stdin, raw)
            result: T | ApiError
            result, names = pickle.loads(read_frame(self._stdout))
        except (EOFError, OSError):
            self.end()
            if late.is_set():
                reason = f"reading this body of {len(raw)} bytes took more than {seconds:.0f} seconds; send less"
                return ApiError(reason, status=413, code="body_too_large")
            reason = f"the process that was reading this body of {len(raw)} bytes has died; send less, or try again"
            return ApiError(reason, status=503, code="body_not_read")
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():  # even if the answer came just in time: the process is about to end
                self.end()
        for name in names:
            unknown.tell(name)
        return result

    def end(self) -> None:
        """Ends the process and waits for its end."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # what remained to be written
                pipe.close()
