"""``python -m shadowkv.engine.structured.grammar_process FD``: the process that grammars' processes are forked from.

A grammar may take forever to compile or to match, and neither can be interrupted, so each has a process of its own,
which ends at a limit of processor time or memory. Forked from one that has the library and the vocabulary, it starts
within milliseconds and shares their memory.

FD is the socket to the engine's process (``grammar_pool.py``), which sends a vocabulary first, and then one end of a
socket for each process that is to be forked. Its process id is the answer; how it has ended is told later. All of
them end with this one, and this one with the engine's.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from shadowkv.engine.structured.grammar_messages import COMPILED, MASK, OUT_OF_MEMORY, REFUSED, Compile, Match
from shadowkv.engine.structured.grammar_text import grammar_kind
from shadowkv.engine.structured.vocabulary import Vocabulary, compile_schema

if TYPE_CHECKING:
    import xgrammar

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def main(descriptor: int) -> int:
    """Forks processes until the connection is closed; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole service: the engine's process sees to it
    engine, children = Connection(descriptor), set[int]()
    try:
        vocabulary: Vocabulary = engine.recv()
        info = vocabulary.info()
        allowed = vocabulary.without_control_characters()
        gc.freeze()  # a collection in a fork would copy all of it
        ended, wakes = socket.socketpair()
        for end in (ended, wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(engine, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        engine.send(None)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if ended in ready:
                with suppress(BlockingIOError):
                    ended.recv(4096)
                for pid, status in _reap():
                    children.discard(pid)
                    engine.send((pid, os.waitstatus_to_exitcode(status)))
            if engine in ready:
                asked, forker = recv_handle(engine), os.getpid()
                if (pid := os.fork()) == 0:
                    _end_with(forker)
                    children.clear()  # they are not its own to end
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (engine, ended, wakes, selector):
                        other.close()
                    _serve(Connection(asked), info, allowed)
                os.close(asked)
                children.add(pid)
                engine.send(pid)
    except (OSError, EOFError):
        return 0
    finally:
        signal.set_wakeup_fd(-1)
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _end_with(forker: int) -> None:
    """Has this process end with the one that it was forked from, which may have ended by now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != forker:
        os._exit(0)


def _reap() -> list[tuple[int, int]]:
    found = []
    with suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def _serve(engine: Connection, info: xgrammar.TokenizerInfo, allowed: bytes) -> NoReturn:
    """Compiles one grammar and matches answers with it, in a process of its own."""
    try:
        asked: Compile = engine.recv()
        _limit_memory(asked.memory)
        with _processor_time(asked.seconds), _low_priority(asked.niceness) as thread:
            try:
                grammar = thread.submit(compile_schema, info, asked.rules, asked.one_line).result()
            except ValueError as error:
                engine.send_bytes(REFUSED + str(error).encode())
                os._exit(0)
        engine.send_bytes(COMPILED + b"%d" % grammar.memory_size_bytes)
        matchers = _Matchers(grammar, None if grammar_kind(asked.rules) else allowed)
        while True:
            message: Match = engine.recv()
            matchers.forget(message.ended)
            with _processor_time(asked.match_seconds):
                mask = b"" if message.answer is None else matchers.mask(message.answer, message.tokens)
            engine.send_bytes(MASK + mask)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except (OSError, EOFError):  # the engine has no more use for it
        os._exit(0)


class _Matchers:
    """Where answers are in one grammar.

    Args:
        allowed: bits of the tokens that may come at all; None for all of them.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, allowed: bytes | None) -> None:
        import xgrammar

        self._new = partial(xgrammar.GrammarMatcher, grammar)
        self._matchers: dict[int, xgrammar.GrammarMatcher] = {}
        self._bits = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
        self._allowed = None if allowed is None else np.frombuffer(allowed, np.int32)

    def mask(self, answer: int, tokens: list[int]) -> bytes:
        """Bits of the tokens that may come next; none where an answer is at its end, or has left the grammar."""
        if (matcher := self._matchers.get(answer)) is None:
            matcher = self._matchers[answer] = self._new()
        if not all(map(matcher.accept_token, tokens)) or matcher.is_terminated():
            return bytes(self._bits.nbytes)
        matcher.fill_next_token_bitmask(self._bits, 0)
        bits = self._bits.numpy()[0]
        return (bits if self._allowed is None else bits & self._allowed).tobytes()

    def forget(self, answers: list[int]) -> None:
        """Forgets answers that have ended; some may never have come."""
        for answer in answers:
            self._matchers.pop(answer, None)


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Ends the process by SIGPROF where what is done within takes longer, waiting not counted."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _low_priority(by: int) -> Iterator[ThreadPoolExecutor]:
    """A thread whose priority is lower than this process's, to which not everybody may return."""

    def lower() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + by)

    with ThreadPoolExecutor(1, initializer=lower) as thread:
        yield thread


def _limit_memory(more: int) -> None:
    """Limits this process's address space to what it has and ``more`` bytes, where the platform tells that."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
