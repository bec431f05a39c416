"""Starts the process of an engine, and notices when it ends."""

from __future__ import annotations

import builtins
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.process.client import EngineClient
from shadowkv.engine.process.facts import EngineFacts, Launch, NotStarted

GRACE_SECONDS = 5.0
"""How long the process may take to end beyond what it was given for a step."""


class EngineProcess:
    """The process of one or two engines. It ends with this one, however that ends.

    Args:
        compare: policy of a second cache over the same weights, for comparisons.
        module: what runs there: its command line has the socket to this process.

    Attributes:
        clients: of its engines, the served one first.

    Raises what loading the model raises, as ValueError, MemoryError or OSError; ChildProcessError where it just ends.
    """

    def __init__(
        self, config: EngineConfig, compare: str | None = None, module: str = "shadowkv.engine.process.main"
    ) -> None:
        # Only this user may enter it. It is removed when this process ends, or by the engine's, which outlives it.
        self._folder = tempfile.TemporaryDirectory(prefix="shadowkv-", ignore_cleanup_errors=True)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            # Modules are found where this process finds them; a terminal, its input and signals are for this one alone.
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        self._control = Connection(ours.detach())
        self.clients: list[EngineClient] = []
        try:
            facts = self._facts(Launch(config, compare, self._folder.name))
            self.clients = [EngineClient.of_process(fact, self._folder.name) for fact in facts]
        except BaseException:  # Ctrl-C, for example
            self.stop(0.0)
            raise
        threading.Thread(target=self._watch, name="shadowkv-engine-process", daemon=True).start()

    def _facts(self, launch: Launch) -> list[EngineFacts]:
        answer: Any = None
        with suppress(OSError, EOFError):
            self._control.send(launch)
            answer = self._control.recv()
        if answer is None:
            raise ChildProcessError(f"the engine's process has not started: {self._ending()}")
        if isinstance(answer, NotStarted):
            raise getattr(builtins, answer.kind)(answer.message)
        facts: list[EngineFacts] = answer
        return facts

    def stop(self, seconds: float) -> None:
        """Ends the process after the current step, within ``seconds``; requests in flight get EngineDead."""
        for client in self.clients:
            client.stopping = True
        with suppress(OSError):
            self._control.send(seconds)
        try:
            self._process.wait(seconds + GRACE_SECONDS if self.clients else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        self._folder.cleanup()

    def _watch(self) -> None:
        self._process.wait()
        for client in self.clients:
            client.has_ended(f"the engine has died: its process has ended ({self._ending()})")

    def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        code = self._process.returncode
        if code is None:
            return "its connection is closed"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
