"""``Forker``: starts the process that grammar processes are forked from (``grammar_process.py``). ``GrammarPool`` has
one."""

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
"""Time limit for the start of the forker process, which takes two seconds, and more on a busy machine."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment for a process with one thread, because only such a process can be forked safely. Without it, libraries
start threads when they are imported."""

P = TypeVar("P")


class Forker(Generic[P]):
    """The forker process. It is started when it is first needed, and again if it has ended.

    Args:
        vocabulary: returns the model's vocabulary, for which grammars are compiled.
        module: the module that the process runs.

    Attributes:
        connection: the connection to the process; None if it does not run.
        is_ready: whether the process can fork.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], module: str) -> None:
        self._vocabulary, self._module = vocabulary, module
        self._process: subprocess.Popen[bytes] | None = None
        self._began, self._asked = 0.0, deque[P]()
        self.connection: Connection | None = None
        self.is_ready = False

    def start(self) -> Connection:
        """Starts the process and returns the connection. Raises OSError if it ends at once."""
        # Both processes are in one session, because the kernel can ignore priorities between processes of different
        # sessions.
        self._process, self.connection = start_process(self._module, own_session=False, environment=ONE_THREAD)
        self._began = time.monotonic()
        self.connection.send(self._vocabulary())
        return self.connection

    def late_in(self, now: float) -> float | None:
        """Seconds that are left of ``START_SECONDS``; None if the process is not starting."""
        return None if self.connection is None or self.is_ready else self._began + START_SECONDS - now

    def fork(self, descriptor: int, asks: P) -> None:
        """Requests the fork of a process that gets a copy of ``descriptor``. When the process exists, ``hear`` returns
        ``asks``."""
        assert self.connection is not None
        self._asked.append(asks)
        send_handle(self.connection, descriptor, None)

    def hear(self) -> tuple[P | None, int, int] | None:
        """Receives the process's next message.

        Returns None if the message says that the forker is ready. For a forked process it returns the ``asks`` of the
        request, the process id and 0. For an ended process it returns None, the process id and the exit code. Raises
        OSError or EOFError if the forker itself has ended.
        """
        assert self.connection is not None
        message: int | tuple[int, int] | None = self.connection.recv()
        if message is None:
            self.is_ready = True
            return None
        return (self._asked.popleft(), message, 0) if isinstance(message, int) else (None, *message)

    def how_it_ended(self) -> str:
        """Describes how the process has ended by itself."""
        assert self._process is not None
        return ending(self._process)

    def end(self) -> None:
        """Ends the process and all processes that it has forked."""
        if self._process is not None and self.connection is not None:
            self._process.kill()
            self._process.wait()
            self.connection.close()
        self.connection, self._process, self.is_ready = None, None, False
        self._asked.clear()
