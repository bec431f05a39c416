"""The forker process, and the grammar processes that are forked from it.

``forker.py`` starts the forker as ``python -m shadowkv.engine.structured.grammar_process FD``. Compiling or matching a
grammar can take forever, and neither can be interrupted. So each grammar has its own process, which ends at a limit of
processor time or memory. The forker has loaded the library and the vocabulary, so a forked process starts within
milliseconds and shares the memory of both.

FD is the file descriptor of the socket to the engine's process (``grammar_pool.py``). The engine sends a vocabulary
first, then one end of a pair of sockets for each process to fork. The forker replies with the process id, and later
reports the process's end. The grammar processes end with the forker, and the forker ends with the engine's process.
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
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from shadowkv.engine.child_process import ignore_stop_signals, limit_memory
from shadowkv.engine.structured.grammar_messages import COMPILED, MASK, OUT_OF_MEMORY, REFUSED, Compile, Match
from shadowkv.engine.structured.vocabulary import Vocabulary, compile_schema
from shadowkv.grammar_text import grammar_kind

if TYPE_CHECKING:
    import xgrammar

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent ends."""


def main(descriptor: int) -> int:
    """Forks processes until the connection is closed. Returns the exit code."""
    ignore_stop_signals()
    engine, children = Connection(descriptor), set[int]()
    try:
        vocabulary: Vocabulary = engine.recv()
        info = vocabulary.info()
        allowed = vocabulary.without_control_characters()
        gc.freeze()  # a garbage collection in a fork would copy all shared memory
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
                    children.clear()  # these are the forker's children, which this process must not end
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
    """Makes this process end when the forker ends, or now if the forker has ended already."""
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
    """Runs a grammar process: compiles one grammar and matches answers with it."""
    try:
        asked: Compile = engine.recv()
        limit_memory(asked.memory, is_beside=True)
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
    except (OSError, EOFError):  # the engine has closed the connection
        os._exit(0)


class _Matchers:
    """The grammar states of all answers that follow one grammar.

    Args:
        allowed: bits of the tokens that can ever be allowed; None for all tokens.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, allowed: bytes | None) -> None:
        import xgrammar

        self._new = partial(xgrammar.GrammarMatcher, grammar)
        self._matchers: dict[int, xgrammar.GrammarMatcher] = {}
        self._bits = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
        self._allowed = None if allowed is None else np.frombuffer(allowed, np.int32)

    def mask(self, answer: int, tokens: list[int]) -> bytes:
        """Adds tokens to an answer and returns its next mask, a bit for each token. All bits are 0 if the answer is at
        its end, or if its tokens violate the grammar."""
        if (matcher := self._matchers.get(answer)) is None:
            matcher = self._matchers[answer] = self._new()
        if not all(map(matcher.accept_token, tokens)) or matcher.is_terminated():
            return bytes(self._bits.nbytes)
        matcher.fill_next_token_bitmask(self._bits, 0)
        bits = self._bits.numpy()[0]
        return (bits if self._allowed is None else bits & self._allowed).tobytes()

    def forget(self, answers: list[int]) -> None:
        """Drops answers that have ended. Unknown numbers are ignored."""
        for answer in answers:
            self._matchers.pop(answer, None)


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """A context that ends the process by SIGPROF if it takes more processor time than ``seconds``."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _low_priority(by: int) -> Iterator[ThreadPoolExecutor]:
    """A context with a thread that has a lower priority than this process. The process keeps its own priority, because
    an unprivileged process could not raise it again."""

    def lower() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + by)

    with ThreadPoolExecutor(1, initializer=lower) as thread:
        yield thread


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
