"""``GrammarPool``: manages the grammar processes, from the engine's process. ``Grammars`` has one.

Each grammar process compiles one grammar and matches answers with it (``grammar_process.py``). The pool decides when a
process starts and which slow processes run, and moves the answers of a process that has ended to a new one. All of this
runs on one thread, which sleeps until a process replies or another thread calls the pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from shadowkv.engine.request import RequestError
from shadowkv.engine.structured.forker import Forker
from shadowkv.engine.structured.grammar_messages import COMPILED, OUT_OF_MEMORY, REFUSED, Compile, Match
from shadowkv.engine.structured.json_schema import not_compiled, not_followed, refusal, too_costly
from shadowkv.engine.structured.vocabulary import Vocabulary
from shadowkv.engine.tenant_queue import TenantQueue
from shadowkv.prefix_cache.protocol import settle
from shadowkv.wording import counted

ATTEMPTS = ((0.1, 6), (2.0, 2), (30.0, 3))
"""Attempts to compile a grammar: the limit on processor time in seconds, and how many such attempts run at a time. It
is unknown in advance which grammar takes long. So a grammar that reaches the limit starts again in the next attempt,
beside others that reached it. Usual grammars take milliseconds. Patterns of the longest strings that xgrammar supports
take two seconds."""

MATCH_SECONDS = 1.0
"""Limit on the processor time for one token of an answer. Usual tokens take 0.02 to 0.2 ms. 60 alternatives of strings
take 0.34 s while all of them are possible. A few lines of grammar can take hours."""

MEMORY_BYTES = 2**30
"""Limit on a process's memory, beyond the vocabulary."""

QUICK_SECONDS = 0.01
"""Work that takes longer is slow: the process's priority is lowered by ``NICENESS``, and slow processes take turns."""

SLOW_AT_ONCE, TURN_SECONDS = 2, 0.25
"""Number of slow processes that run at a time, and the seconds of a turn while other slow processes wait."""

NICENESS = 19
"""Niceness of slow work and of compilations: the maximum. If the engine has a thread on each core, a step is as slow as
the thread that shares its core with such work."""

KEPT_BYTES = 2**28
"""Limit on the memory of processes that are kept although their grammars are unused."""

PROCESS_BYTES = 2**22
"""Estimated memory of a process without its grammar."""

ENDED = 16
"""Number of ended answers after which an idle process is told to drop them. Each takes memory in the process."""

REMEMBERED = 4_096
"""Number of grammars that are remembered as too costly. They are refused at once the next time."""

MAX_DEATHS = 3
"""An answer fails when its process has ended more often than this, each time for other reasons than this answer."""

SHUT_DOWN = "the engine is being shut down"
FAILED = "grammar matching has failed on this server; the log has the details"


class Grammar(NamedTuple):
    """A JSON schema or another grammar (``grammar_text``), and ``SamplingParams.json_one_line``."""

    rules: str
    one_line: bool


class Answer(Protocol):
    """An answer of a ``tenant`` that follows a ``grammar``. The pool's thread calls its methods."""

    grammar: Grammar
    tenant: str

    def may_continue(self, mask: bytes) -> None:
        """Sets the next mask: a bit for each token, 1 if it is allowed."""

    def fail(self, error: RequestError) -> None:
        """Ends the answer with an error."""


@dataclass(eq=False)
class _Matched:
    """An answer that a process matches. ``tokens`` are all its tokens, and ``new`` are those that the process has not
    received yet. ``deaths`` counts how often its process has ended for other reasons than this answer."""

    answer: Answer
    new: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    deaths: int = 0


@dataclass(eq=False)
class _Process:
    """The process of one grammar.

    Attributes:
        tenants: the tenants that have requested the grammar. The first pays for the compilation.
        waiters: futures that are settled when the grammar is compiled.
        matched: the answers that the process matches, by number.
        ended: numbers of ended answers that the process must drop.
        attempt: index in ``ATTEMPTS`` of the current attempt to compile the grammar.
        owed: numbers of the answers that wait for a mask, other than ``current``.
        current: number of the answer whose mask is being computed; None if there is none.
        pays: the tenant that pays for the newest work.
        pid: process id; None before the fork and after the end.
        bytes: memory of the process with the compiled grammar.
        began: time at which the newest work began, in seconds.
        had: processor time of the process at ``began``, in seconds.
    """

    grammar: Grammar
    tenants: list[str] = field(default_factory=list)
    waiters: list[Future[None]] = field(default_factory=list)
    matched: dict[int, _Matched] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    attempt: int = 0
    owed: TenantQueue[int] = field(default_factory=partial(TenantQueue[int], 1))
    current: int | None = None
    pays: str = ""
    connection: Connection | None = None
    pid: int | None = None
    bytes: int = 0
    compiled: bool = False
    began: float = 0.0
    had: float = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether an answer uses the process or a future waits for it."""
        return bool(self.matched) or any(not waiter.done() for waiter in self.waiters)

    def signal(self, number: int) -> None:
        """Sends the process a signal, unless it has ended."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def seconds(self) -> float:
        """Reads the process's processor time from Linux's clock for its id. Returns 0 if it has ended, and on other
        systems."""
        if self.pid is not None:
            with suppress(OSError):
                return time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid(3)
        return 0.0

    def is_slow(self, now: float) -> bool:
        """Whether its current work has taken long, both in time and in processor time. First attempts to compile never
        count, because they are short."""
        if self.pid is None or not (self.compiled or self.attempt):
            return False
        return now - self.began >= QUICK_SECONDS <= self.seconds() - self.had

    def lower_priority(self, by: int) -> None:
        """Sets its niceness to the engine's plus ``by``. An unprivileged user cannot raise a priority again: the call
        then has no effect."""
        if self.pid is not None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0) + by)


class GrammarPool:
    """The grammar processes, which are started when needed. Any thread can call the public methods.

    Args:
        vocabulary: returns the model's vocabulary, for which grammars are compiled.
        module: the module of the process that grammar processes are forked from.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        module: str = "shadowkv.engine.structured.grammar_process",
    ) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None
        self._lock, self._closed, self._why_closed = threading.Lock(), False, SHUT_DOWN
        self._forker: Forker[_Process] = Forker(vocabulary, module)
        self._by_pid: dict[int, _Process] = {}
        self._grammars: OrderedDict[Grammar, _Process] = OrderedDict()
        self._attempts = [TenantQueue[_Process](places) for _, places in ATTEMPTS]
        self._too_costly: OrderedDict[tuple[str | None, bytes], str] = OrderedDict()
        self._busy: set[_Process] = set()
        self._slow, self._turn_ends = set[_Process](), 0.0
        self._running, self._stopped = set[_Process](), TenantQueue[_Process](SLOW_AT_ONCE + 1)

    # -- from any thread ---------------------------------------------------------------------------------------------

    def compile(self, grammar: Grammar, tenant: str) -> Future[None]:
        """Starts to compile a grammar, which is then kept for a while. The future raises RequestError if the compiler
        refuses the grammar. It raises SchemaTimeout if compiling takes too much time or memory, or if the pool is
        closed. Cancelling the future ends the compilation if no other future waits for it."""
        compiled: Future[None] = Future()
        if self._do(partial(self._compile, grammar, tenant, compiled)):
            compiled.add_done_callback(lambda done: self._do(self._end_unwanted) if done.cancelled() else None)
        else:
            settle(compiled, not_compiled(self._why_closed, grammar.rules))
        return compiled

    def open(self, number: int, answer: Answer) -> None:
        """Starts an answer under a new number. The answer soon gets its first mask."""
        if not self._do(partial(self._match, number, _Matched(answer))):
            answer.fail(not_followed(self._why_closed, answer.grammar.rules))

    def accept(self, number: int, answer: Answer, token: int) -> None:
        """Adds an answer's next token. The answer soon gets its next mask."""
        if not self._do(partial(self._accept, number, answer.grammar, token)):
            answer.fail(not_followed(self._why_closed, answer.grammar.rules))

    def end(self, number: int, answer: Answer) -> None:
        """Drops an answer that has ended."""
        self._do(partial(self._end, number, answer.grammar))

    def close(self) -> None:
        """Ends the processes. Pending compilations and answers fail."""
        with self._lock:
            if self._closed or self._thread is None:
                self._closed = True
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _do(self, command: Callable[[], None]) -> bool:
        """Runs a command on the pool's thread. Returns False if the pool is closed."""
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._loop = asyncio.SelectorEventLoop()
                self._loop.set_exception_handler(self._fail)
                self._thread = threading.Thread(target=self._run, name="shadowkv-grammars", daemon=True)
                self._thread.start()
            self._loop.call_soon_threadsafe(self._handle, command)
        return True

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()  # runs the commands that came before the pool was closed
        self._end_forker()
        self._refuse_all(self._why_closed)
        self._loop.close()

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Closes the pool after a fault."""
        loop.default_exception_handler(context)
        with self._lock:
            if not self._closed:
                self._closed, self._why_closed = True, FAILED
        loop.stop()

    def _handle(self, event: Callable[[], None]) -> None:
        event()
        self._start_some()
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._share_out(time.monotonic())
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._handle, lambda: None)

    def _compile(self, grammar: Grammar, tenant: str, compiled: Future[None]) -> None:
        if reason := self._known(grammar, tenant):
            settle(compiled, too_costly(reason, grammar.rules))
            return
        process = self._process(grammar, tenant)
        if process.compiled:
            settle(compiled, None)
        else:
            process.waiters.append(compiled)

    def _process(self, grammar: Grammar, tenant: str) -> _Process:
        """Returns the process of a grammar, and makes it the most recently used one. A process that does not run is
        queued to start. If several tenants wait for it, it starts at the turn of any of them."""
        process = self._grammars.pop(grammar, None) or _Process(grammar)
        self._grammars[grammar] = process
        if process.connection is None and tenant not in process.tenants:
            process.tenants.append(tenant)
            self._attempts[process.attempt].append(tenant, process)
        return process

    def _match(self, number: int, matched: _Matched, owed: bool = True) -> None:
        """Gives an answer to the process of its grammar. ``owed`` says whether the answer waits for a mask."""
        answer = matched.answer
        if reason := self._known(answer.grammar, answer.tenant):
            answer.fail(too_costly(reason, answer.grammar.rules))
            return
        process = self._process(answer.grammar, answer.tenant)
        process.matched[number] = matched
        if owed:
            process.owed.append(answer.tenant, number)
        self._give_work(process)

    def _accept(self, number: int, grammar: Grammar, token: int) -> None:
        process = self._grammars.get(grammar)
        if process is None or number not in process.matched:
            return  # the answer has failed
        matched = process.matched[number]
        matched.tokens.append(token)
        matched.new.append(token)
        process.owed.append(matched.answer.tenant, number)
        self._give_work(process)

    def _end(self, number: int, grammar: Grammar) -> None:
        process = self._grammars.get(grammar)
        if process is None or (matched := process.matched.pop(number, None)) is None:
            return
        process.owed.remove(matched.answer.tenant, number)
        process.ended.append(number)
        self._give_work(process)
        self._end_unwanted()

    def _known(self, grammar: Grammar, tenant: str) -> str | None:
        """Returns why a grammar is refused, or None if it is not. It is refused if it was too costly to compile, or too
        costly to match in an answer of this tenant. Answers of other tenants need not be as costly."""
        digest = _digest(grammar)
        return self._too_costly.get((None, digest)) or self._too_costly.get((tenant, digest))

    def _remember(self, grammar: Grammar, tenant: str | None, reason: str) -> None:
        self._too_costly[tenant, _digest(grammar)] = reason
        while len(self._too_costly) > REMEMBERED:
            self._too_costly.popitem(last=False)

    # -- processes, on the thread ------------------------------------------------------------------------------------

    def _start_some(self) -> None:
        if not any(self._attempts):
            return
        if self._forker.connection is None:
            try:
                self._loop.add_reader(self._forker.start(), self._handle, self._hear_forker)
            except OSError as error:
                self._not_started(str(error))
        if not self._forker.is_ready:
            return
        for attempt, queued in enumerate(self._attempts):
            compiling = [p for p in self._grammars.values() if p.attempt == attempt and p.connection and not p.compiled]
            in_use = Counter(process.tenants[0] for process in compiling)
            while (process := queued.pop(in_use)) is not None:
                for tenant in process.tenants:
                    queued.remove(tenant, process)
                in_use[process.tenants[0]] += 1
                self._fork(process)

    def _fork(self, process: _Process) -> None:
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # the forker has ended, which _hear_forker handles
            self._forker.fork(theirs.fileno(), process)
        process.connection = Connection(ours.detach())
        process.pays = process.tenants[0]
        self._works(process)
        self._loop.add_reader(process.connection, self._handle, partial(self._hear, process))
        seconds, _ = ATTEMPTS[process.attempt]
        self._send(process, Compile(*process.grammar, NICENESS, seconds, MATCH_SECONDS, MEMORY_BYTES))

    def _send(self, process: _Process, message: Compile | Match) -> None:
        """Sends a message to a process that waits for one. Sending to a stopped process could block this thread."""
        assert process.connection is not None
        with suppress(OSError):  # the process has ended, which _hear_forker handles
            process.connection.send(message)

    def _hear(self, process: _Process) -> None:
        """Handles a reply of a process. The forker reports the process's end."""
        if process.connection is None:
            return  # the process was ended in the meantime
        try:
            answer = process.connection.recv_bytes()
        except (EOFError, OSError):
            self._loop.remove_reader(process.connection)
            return
        kind, rest = answer[:1], answer[1:]
        was_slow = process in self._slow
        self._rests(process)
        if was_slow:
            process.lower_priority(0)
            process.signal(signal.SIGCONT)  # it can have been stopped after its reply
        if not process.compiled:
            self._attempts[process.attempt].had(process.tenants[0])
        if kind == REFUSED:
            self._give_up(process, refusal(rest.decode(), process.grammar.rules))
        elif kind == COMPILED:
            process.compiled, process.bytes = True, int(rest) + PROCESS_BYTES
            for waiter in process.waiters:
                settle(waiter, None)
            process.waiters.clear()
            self._end_unwanted()
        else:
            number, process.current = process.current, None
            if number in process.matched:
                process.matched[number].answer.may_continue(rest)
        self._give_work(process)

    def _give_work(self, process: _Process) -> None:
        if not process.compiled or process in self._busy:
            return
        number = process.owed.pop(Counter())
        if number is None and len(process.ended) < ENDED:
            return
        process.current = number
        tokens: list[int] = []
        if number is not None:
            matched = process.matched[number]
            tokens, matched.new, process.pays = matched.new, [], matched.answer.tenant
        self._works(process)
        self._send(process, Match(number, tokens, process.ended))
        process.ended = []

    def _end_unwanted(self) -> None:
        """Ends compilations for which no future waits. If unused processes take more than ``KEPT_BYTES``, it ends the
        least recently used ones."""
        unused = [process for process in self._grammars.values() if not process.is_wanted]
        over = sum(process.bytes for process in unused) - KEPT_BYTES
        for process in unused:
            if process.compiled and over <= 0:
                continue
            over -= process.bytes
            self._forget(process)
            process.signal(signal.SIGKILL)

    def _forget(self, process: _Process) -> None:
        self._grammars.pop(process.grammar, None)
        for tenant in process.tenants:
            self._attempts[process.attempt].remove(tenant, process)

    def _give_up(self, process: _Process, error: RequestError, no_fault: str | None = None) -> None:
        """Fails all futures and answers of a process. ``no_fault`` is the reason if the grammar is not at fault, else
        None."""
        self._forget(process)
        for waiter in process.waiters:
            settle(waiter, error)
        for matched in process.matched.values():
            matched.answer.fail(error if no_fault is None else not_followed(no_fault, process.grammar.rules))
        process.waiters, process.matched = [], {}

    def _works(self, process: _Process) -> None:
        process.began, process.had = time.monotonic(), process.seconds()
        self._busy.add(process)

    def _rests(self, process: _Process) -> None:
        for processes in (self._busy, self._slow, self._running):
            processes.discard(process)
        self._stopped.remove(process.pays, process)

    def _share_out(self, now: float) -> float | None:
        """Lets slow processes take turns. Returns the seconds until this method must be called again; None if it need
        not be."""
        new = {process for process in self._busy - self._slow if process.is_slow(now)}
        self._slow |= new
        if now >= self._turn_ends:
            new |= self._running
            self._running, self._turn_ends = set(), now + TURN_SECONDS
        for process in new:
            if process.compiled:
                process.lower_priority(NICENESS)
            self._stopped.append(process.pays, process)
        for process in self._turn():
            new.discard(process)
            process.signal(signal.SIGCONT)
        for process in new:
            process.signal(signal.SIGSTOP)
        due = [self._turn_ends - now] if self._slow else []
        if any(process.pid for process in self._busy - self._slow):
            due.append(QUICK_SECONDS)
        if (late_in := self._forker.late_in(now)) is not None:
            due.append(late_in)
            if late_in <= 0:
                self._not_started("it takes too long")
        return max(0.0, min(due)) if due else None

    def _turn(self) -> Iterator[_Process]:
        """Yields slow processes that may run now, until all their places are filled."""
        in_use = Counter(process.pays for process in self._running)
        while len(self._running) < SLOW_AT_ONCE and (process := self._stopped.pop(in_use)) is not None:
            in_use[process.pays] += 1
            self._running.add(process)
            yield process

    # -- ends of processes, on the thread ----------------------------------------------------------------------------

    def _hear_forker(self) -> None:
        if self._forker.connection is None:
            return  # the forker was ended in the meantime
        try:
            message = self._forker.hear()
        except (EOFError, OSError):
            how, was_ready = self._forker.how_it_ended(), self._forker.is_ready
            if not was_ready:
                self._not_started(how)
                return
            self._end_forker()
            for lost in [*self._grammars.values()]:
                self._has_ended(lost, None, how)
            return
        if message is None:
            return
        process, pid, code = message
        if process is not None:
            process.pid, self._by_pid[pid] = pid, process
            if self._grammars.get(process.grammar) is not process:  # it was dropped in the meantime
                process.signal(signal.SIGKILL)
        elif (ended := self._by_pid.pop(pid, None)) is not None:
            if ended in self._busy and ended.connection is not None and ended.connection.poll():
                self._hear(ended)  # its last reply, which can arrive together with its end
            self._has_ended(ended, code, f"exit code {code}" if code >= 0 else signal.Signals(-code).name)

    def _not_started(self, how: str) -> None:
        self._end_forker()
        self._refuse_all(f"the grammar process has not started ({how})")

    def _end_forker(self) -> None:
        if self._forker.connection is not None:
            self._loop.remove_reader(self._forker.connection)
        for process in self._by_pid.values():
            process.signal(signal.SIGKILL)
        self._forker.end()
        self._by_pid.clear()

    def _refuse_all(self, reason: str) -> None:
        for process in [*self._grammars.values()]:
            self._disconnect(process)
            self._give_up(process, not_compiled(reason, process.grammar.rules), reason)

    def _disconnect(self, process: _Process) -> None:
        self._rests(process)
        if process.connection is not None:
            self._loop.remove_reader(process.connection)
            process.connection.close()
            process.connection, process.pid = None, None

    def _has_ended(self, process: _Process, code: int | None, how: str) -> None:
        """Moves the answers of an ended process to a new one, or fails them. ``code`` is the exit code; None if all
        processes have ended with the forker."""
        self._disconnect(process)
        if self._grammars.get(process.grammar) is not process:
            return  # it is not used any more
        number, reason, rules = process.current, _reason(code, how, process), process.grammar.rules
        too_much = code in (-signal.SIGPROF, OUT_OF_MEMORY)
        if not process.compiled:
            self._attempts[process.attempt].had(process.tenants[0])
            if code == -signal.SIGPROF and process.attempt + 1 < len(ATTEMPTS):
                process.attempt += 1
                for tenant in process.tenants:
                    self._attempts[process.attempt].append(tenant, process)
            elif too_much:
                self._remember(process.grammar, None, reason)
                self._give_up(process, too_costly(reason, rules))
            else:
                self._give_up(process, not_compiled(reason, rules), reason)
            return
        self._forget(process)
        owed = {*process.owed.clear(), number}
        if too_much and number is not None and number in process.matched:
            answer = process.matched.pop(number).answer
            if code != OUT_OF_MEMORY or not process.matched:  # all answers of a process share its memory
                self._remember(process.grammar, answer.tenant, reason)
            answer.fail(too_costly(reason, rules))
        for number, matched in process.matched.items():
            self._go_on(number, matched, number in owed, reason)

    def _go_on(self, number: int, matched: _Matched, owed: bool, reason: str) -> None:
        """Continues an answer in another process."""
        matched.deaths += 1
        answer = matched.answer
        if matched.deaths > MAX_DEATHS:
            answer.fail(not_followed(reason, answer.grammar.rules))
            return
        matched.new = [*matched.tokens]
        self._match(number, matched, owed)


def _reason(code: int | None, how: str, process: _Process) -> str:
    """Describes why a process has ended."""
    what = "matching the answer takes" if process.compiled else "compiling it takes"
    if code == -signal.SIGPROF:
        seconds = MATCH_SECONDS if process.compiled else ATTEMPTS[process.attempt][0]
        return f"{what} more than {counted(round(seconds), 'second')}"
    if code == OUT_OF_MEMORY:
        return f"{what} more than {MEMORY_BYTES / 2**30:g} GiB of memory"
    return f"the process that {'matched' if process.compiled else 'compiled'} it has ended ({how})"


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.one_line} {grammar.rules}".encode("utf-8", "surrogatepass")).digest()
