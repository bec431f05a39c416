"""Schemas whose compilation may never end are compiled in another process first, which is killed at a limit.

The compiler cannot be interrupted, and a grammar cannot be sent between processes (22 MB in memory are gigabytes as
JSON), so one that has compiled there is compiled again here.
"""

from __future__ import annotations

import hashlib
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from shadowkv.engine.child_process import ending, start_process
from shadowkv.engine.request import SchemaTimeout
from shadowkv.engine.structured.grammar_text import grammar_kind
from shadowkv.engine.structured.json_schema import Effort, name_and_param, refusal
from shadowkv.engine.structured.vocabulary import Vocabulary
from shadowkv.wording import counted

PROCESSES = 2
"""Schemas that are tried at a time. Each process takes about 0.3 GiB."""

SECONDS: dict[Effort, float] = {"medium": 8.0, "large": 30.0}
"""How long a compilation may take. Usual patterns take milliseconds, those of the longest strings that xgrammar follows
two seconds; as many states and lengths of strings as a schema may have, 21."""

START_SECONDS = 120.0
"""How long a process may take to start: two seconds, and more on a busy machine."""

REMEMBERED = 4_096
"""Schemas whose outcome is remembered."""


class SchemaTrials:
    """The processes that try schemas, started when they are needed; may be used from any thread.

    Args:
        vocabulary: that the grammars are for.
        module: what runs in a process.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        module: str = "shadowkv.engine.structured.trial_process",
    ) -> None:
        self._vocabulary, self._module = vocabulary, module
        self._turns, self._lock = threading.BoundedSemaphore(PROCESSES), threading.Lock()
        self._idle: list[_Process] = []
        self._working: set[_Process] = set()
        self._outcomes: dict[bytes, str | None] = {}
        self._closed = False

    def run(self, schema: str, one_line: bool, seconds: float) -> None:
        """Returns if the compiler is done with the schema in ``seconds``, whatever it says, which is remembered.

        Raises SchemaTimeout otherwise, and at once the next time.
        """
        key = hashlib.sha256(f"{one_line} {schema}".encode("utf-8", "surrogatepass")).digest()
        if self._known(key, schema):
            return
        with self._turns:
            if self._known(key, schema):  # by now
                return
            process = self._process(schema)
            try:
                late = process.compile(schema, one_line, seconds)
            finally:
                self._put_back(process)
            self._check_open(schema)
            with self._lock:
                self._outcomes[key] = late
                if len(self._outcomes) > REMEMBERED:
                    self._outcomes.pop(next(iter(self._outcomes)))
        self._known(key, schema)

    def close(self) -> None:
        """Ends the processes; schemas being tried are refused."""
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._working]
        for process in processes:
            process.end()

    def _known(self, key: bytes, schema: str) -> bool:
        with self._lock:
            if (late := self._outcomes.get(key)) is not None:
                other = (
                    "a simpler one" if grammar_kind(schema) else "simpler patterns, or fewer properties to be counted"
                )
                told = refusal(f"{late}; use {other}", schema)
                raise SchemaTimeout(str(told), told.param)
            return key in self._outcomes

    def _process(self, schema: str) -> _Process:
        with self._lock:
            self._idle = [process for process in self._idle if process.is_alive]
            process = self._idle.pop() if self._idle else _Process(self._module)
            self._working.add(process)
        if not process.is_ready:
            try:
                process.start(self._vocabulary())
            except (OSError, EOFError) as error:
                self._put_back(process)
                self._check_open(schema)
                raise _not_compiled(f"a process for it has not started ({error})", schema) from error
        return process

    def _put_back(self, process: _Process) -> None:
        with self._lock:
            self._working.discard(process)
            usable = process.is_ready and not self._closed
            if usable:
                self._idle.append(process)
        if not usable:
            process.end()

    def _check_open(self, schema: str) -> None:
        if self._closed:
            raise _not_compiled("the engine is being shut down", schema)


def _not_compiled(reason: str, schema: str) -> SchemaTimeout:
    what, param = name_and_param(schema)
    return SchemaTimeout(f"the {what} was not compiled: {reason}", param)


class _Process:
    """One process, which tries one schema at a time; it is started by now, and does not know the vocabulary yet.

    Attributes:
        is_ready: whether it takes schemas.
    """

    def __init__(self, module: str) -> None:
        self.process: subprocess.Popen[bytes]
        self._connection: Connection
        self.process, self._connection = start_process(module)
        self.is_ready = False

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended by itself."""
        return self.process.poll() is None

    def start(self, vocabulary: Vocabulary) -> None:
        """Waits until it takes schemas; raises OSError or EOFError where that fails."""
        self._connection.send(vocabulary)
        if not self._connection.poll(START_SECONDS):
            raise OSError(f"not within {START_SECONDS:g} s")
        self._connection.recv()
        self.is_ready = True

    def compile(self, schema: str, one_line: bool, seconds: float) -> str | None:
        """None if the schema compiles in time or is refused in time; otherwise why not, and it has ended."""
        end = time.monotonic() + seconds
        try:
            self._connection.send((schema, one_line))
            if self._connection.poll(max(0.0, end - time.monotonic())):
                self._connection.recv()
                return None
            reason = f"compiling it takes more than {counted(round(seconds), 'second')}"
        except (OSError, EOFError):
            reason = f"the process that compiled it has ended ({ending(self.process)})"
        self.is_ready = False
        return reason

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        self.is_ready = False
        self.process.kill()
        self.process.wait()
