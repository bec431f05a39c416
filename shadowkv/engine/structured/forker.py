"""The process that the processes of grammars are forked from (``grammar_process.py``), as the engine's sees it."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Generic, TypeVar

from shadowkv.engine.child_process import ending, start_process
from shadowkv.engine.structured.vocabulary import Vocabulary

START_SECONDS = 120.0
"""How long it may take to start: two seconds, and more on a busy machine."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Only a process of one thread may be forked; libraries start others as they are imported."""

P = TypeVar("P")


class Forker(Generic[P]):
    """Started when it is needed, and again where it has ended.

    Args:
        vocabulary: that grammars are for.
        module: what runs in it.

    Attributes:
        connection: to it; None where it does not run.
        is_ready: whether it forks.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], module: str) -> None:
        self._vocabulary, self._module = vocabulary, module
        self._process: subprocess.Popen[bytes] | None = None
        self._began, self._asked = 0.0, deque[P]()
        self.connection: Connection | None = None
        self.is_ready = False

    def start(self) -> Connection:
        """Starts it; raises OSError where it ends at once."""
        # Of this process's session: the kernel may schedule sessions by themselves, whatever priorities they have.
        self._process, self.connection = start_process(self._module, own_session=False, environment=ONE_THREAD)
        self._began = time.monotonic()
        self.connection.send(self._vocabulary())
        return self.connection

    def late_in(self, now: float) -> float | None:
        """Seconds until it has taken too long to start; None where it does not."""
        return None if self.connection is None or self.is_ready else self._began + START_SECONDS - now

    def fork(self, descriptor: int, asks: P) -> None:
        """Has it fork a process with a copy of a descriptor."""
        assert self.connection is not None
        self._asked.append(asks)
        send_handle(self.connection, descriptor, None)

    def hear(self) -> tuple[P | None, int, int] | None:
        """Its next message. None: that it is ready; otherwise who asked for a process that it has forked, and its id;
        or nobody, the id of one that has ended, and its exit code. Raises OSError or EOFError where it has ended
        itself.
        """
        assert self.connection is not None
        message: int | tuple[int, int] | None = self.connection.recv()
        if message is None:
            self.is_ready = True
            return None
        return (self._asked.popleft(), message, 0) if isinstance(message, int) else (None, *message)

    def how_it_ended(self) -> str:
        """For one that has ended by itself."""
        assert self._process is not None
        return ending(self._process)

    def end(self) -> None:
        """Ends it, and all that it has forked."""
        if self._process is not None and self.connection is not None:
            self._process.kill()
            self._process.wait()
            self.connection.close()
        self.connection, self._process, self.is_ready = None, None, False
        self._asked.clear()
