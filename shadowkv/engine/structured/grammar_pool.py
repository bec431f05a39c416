"""The processes of grammars, each of which compiles one and matches answers with it (``grammar_process.py``), as the
engine's process sees them: which is started when, whose turn it is where several take long, and what becomes of the
answers of one that has ended.

All of this is done on one thread, which sleeps until a process answers or somebody asks for something.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import signal
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from shadowkv.engine.request import RequestError
from shadowkv.engine.structured.forker import Forker
from shadowkv.engine.structured.grammar_messages import COMPILED, OUT_OF_MEMORY, REFUSED, Compile, Match
from shadowkv.engine.structured.json_schema import Effort, not_compiled, not_followed, refusal, too_costly
from shadowkv.engine.structured.turns import Turns
from shadowkv.engine.structured.vocabulary import Vocabulary
from shadowkv.engine.tenant_queue import TenantQueue
from shadowkv.prefix_cache.protocol import settle
from shadowkv.wording import counted

COMPILE_SECONDS: dict[Effort, float] = {"small": 8.0, "medium": 8.0, "large": 30.0}
"""Processor time that a compilation may take. Usual patterns take milliseconds, those of the longest strings that
xgrammar follows two seconds; as many states and lengths of strings as a schema may have, 21."""

MATCH_SECONDS = 1.0
"""Processor time that a token of an answer may take. Usual ones take 0.02 to 0.2 ms, 60 alternatives of strings 0.34 s
where they are all open; a few lines of grammar can ask for hours."""

MEMORY_BYTES = 2**30
"""That a process may have beyond the vocabulary."""

COMPILING: dict[Effort, int] = {"small": 3, "medium": 3, "large": 2}
"""Compilations at a time."""

QUICK_SECONDS = 0.01
"""Work of a process that takes longer is slow: its priority is lowered by ``NICENESS``, and it takes turns."""

SLOW_AT_ONCE, TURN_SECONDS = 2, 0.25
"""Processes with slow work that run at a time, and how long each one's turn is while others wait for theirs."""

NICENESS = 19
"""By how much the priority of slow work and of compilations is lowered: as far as it goes. Where the engine computes
with as many threads as there are cores, a step waits for the one whose core is shared."""

KEPT_BYTES = 2**28
"""Memory of the processes that are kept although nobody uses their grammars."""

PROCESS_BYTES = 2**22
"""Memory of a process beside its grammar."""

ENDED = 16
"""Ended answers that a process which has nothing else to do is told of at a time: each takes memory there."""

REMEMBERED = 4_096
"""Grammars that were too costly, and are refused at once the next time."""

MAX_DEATHS = 3
"""Processes that an answer may lose through no fault of its own."""

SHUT_DOWN = "the engine is being shut down"
FAILED = "what follows grammars here has failed; the log has the details"


class Grammar(NamedTuple):
    """A JSON schema or other rules (``grammar_text``), and ``SamplingParams.json_one_line``."""

    rules: str
    one_line: bool


class Answer(Protocol):
    """An answer that follows a grammar. What is called on it is called on the pool's thread.

    Attributes:
        grammar, tenant: its own, and who pays for it.
    """

    grammar: Grammar
    tenant: str

    @property
    def effort(self) -> Effort:
        """What compiling its grammar may take."""

    def may_continue(self, mask: bytes) -> None:
        """Takes a bit for each token, 1 where it may come next."""

    def fail(self, error: RequestError) -> None:
        """Ends it."""


@dataclass(eq=False)
class _Matched:
    """An answer, the tokens that its process does not have yet, and all of them, should it lose that process."""

    answer: Answer
    new: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    deaths: int = 0


@dataclass(eq=False)
class _Process:
    """The process of one grammar.

    Attributes:
        tenants: that have asked for it; the first pays for compiling it.
        waiters: are told once it has compiled.
        matched: the answers that it matches, by their numbers.
        ended: numbers of answers that it is to forget.
        owed: those that wait for their next tokens, ``current`` not among them.
        began, had: when it began with what it did last, and the processor time that it had had by then, in seconds.
    """

    grammar: Grammar
    effort: Effort
    tenants: list[str] = field(default_factory=list)
    waiters: list[Future[None]] = field(default_factory=list)
    matched: dict[int, _Matched] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    owed: TenantQueue[int] = field(default_factory=partial(TenantQueue[int], 1))
    current: int | None = None
    connection: Connection | None = None
    pid: int | None = None
    bytes: int = 0
    compiled: bool = False
    began: float = 0.0
    had: float = 0.0

    @property
    def pays(self) -> str:
        """The tenant that what it is doing is for."""
        found = None if self.current is None else self.matched.get(self.current)
        return self.tenants[0] if found is None else found.answer.tenant

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for it or uses it."""
        return bool(self.matched) or any(not waiter.done() for waiter in self.waiters)

    def signal(self, number: int) -> None:
        """Sends it a signal; it may have ended."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def seconds(self) -> float:
        """Processor time that it has had, of Linux's clock for its id; 0 where it has ended, and elsewhere."""
        if self.pid is not None:
            with suppress(OSError):
                return time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid(3)
        return 0.0

    def is_slow(self, now: float) -> bool:
        """Whether what it does takes long, which is not only waiting for a processor."""
        return self.pid is not None and now - self.began >= QUICK_SECONDS <= self.seconds() - self.had

    def lower_priority(self, by: int) -> None:
        """Lowers its priority; to raise it again is not everybody's right."""
        if self.pid is not None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0) + by)


class GrammarPool:
    """The processes of grammars, started when they are needed; may be used from any thread.

    Args:
        vocabulary: that the grammars are for.
        module: what runs in the process that others are forked from.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        module: str = "shadowkv.engine.structured.grammar_process",
    ) -> None:
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._woken: socket.socket
        self._wakes: socket.socket
        self._selector: selectors.DefaultSelector
        self._thread: threading.Thread | None = None
        self._lock, self._closed, self._why_closed = threading.Lock(), False, SHUT_DOWN
        self._forker: Forker[_Process] = Forker(vocabulary, module)
        self._by_pid: dict[int, _Process] = {}
        self._grammars: OrderedDict[Grammar, _Process] = OrderedDict()
        self._queued = {effort: TenantQueue[_Process](places) for effort, places in COMPILING.items()}
        self._too_costly: OrderedDict[tuple[str | None, bytes], str] = OrderedDict()
        self._busy: set[_Process] = set()
        self._turns, self._slow, self._turn_ends = Turns(SLOW_AT_ONCE), set[_Process](), 0.0

    # -- from any thread ---------------------------------------------------------------------------------------------

    def compile(self, grammar: Grammar, effort: Effort, tenant: str) -> Future[None]:
        """Has a grammar compiled, which is kept for a while. The future raises RequestError where the compiler refuses
        it, SchemaTimeout where it takes too much or the pool is closed; cancelling it ends what nobody waits for."""
        compiled: Future[None] = Future()
        if self._do(partial(self._compile, grammar, effort, tenant, compiled)):
            compiled.add_done_callback(lambda done: self._do(self._end_unwanted) if done.cancelled() else None)
        else:
            settle(compiled, not_compiled(self._why_closed, grammar.rules))
        return compiled

    def open(self, number: int, answer: Answer) -> None:
        """Begins an answer under a number of its own, which is soon told what may come first."""
        if not self._do(partial(self._match, number, _Matched(answer))):
            answer.fail(not_followed(self._why_closed, answer.grammar.rules))

    def accept(self, number: int, answer: Answer, token: int) -> None:
        """Takes an answer's next token; it is soon told what may come behind that."""
        if not self._do(partial(self._accept, number, answer.grammar, token)):
            answer.fail(not_followed(self._why_closed, answer.grammar.rules))

    def end(self, number: int, answer: Answer) -> None:
        """Forgets an answer."""
        self._do(partial(self._end, number, answer.grammar))

    def close(self) -> None:
        """Ends the processes; what is waited for is refused."""
        with self._lock:
            if self._closed or self._thread is None:
                self._closed = True
                return
            self._closed = True
            self._wake()
        self._thread.join()

    def _do(self, command: Callable[[], None]) -> bool:
        """Has the thread do something, unless the pool is closed."""
        with self._lock:
            if self._closed:
                return False
            self._commands.put(command)
            if self._thread is None:
                self._start()
            self._wake()
        return True

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it has not read what woke it before
            self._wakes.send(b"!")

    def _start(self) -> None:
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))
        self._thread = threading.Thread(target=self._run, name="shadowkv-grammars", daemon=True)
        self._thread.start()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            timeout: float | None = None
            while not self._closed:
                for key, _ in self._selector.select(timeout):
                    key.data()
                self._run_commands()
                self._start_some()
                timeout = self._share_out(time.monotonic())
        finally:
            with self._lock:
                if not self._closed:
                    self._why_closed = FAILED
                self._closed = True
            self._run_commands()
            self._end_forker()
            self._refuse_all(self._why_closed)
            for end in (self._woken, self._wakes, self._selector):
                end.close()

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _compile(self, grammar: Grammar, effort: Effort, tenant: str, compiled: Future[None]) -> None:
        if reason := self._known(grammar, tenant):
            settle(compiled, too_costly(reason, grammar.rules))
            return
        process = self._process(grammar, tenant, lambda: effort)
        if process.compiled:
            settle(compiled, None)
        else:
            process.waiters.append(compiled)

    def _process(self, grammar: Grammar, tenant: str, effort: Callable[[], Effort]) -> _Process:
        """The process of a grammar, which is to be started where there is none; it is the last to go from now on. One
        that several tenants wait for starts when it is the turn of any of them."""
        process = self._grammars.pop(grammar, None) or _Process(grammar, effort())
        self._grammars[grammar] = process
        if process.connection is None and tenant not in process.tenants:
            process.tenants.append(tenant)
            self._queued[process.effort].append(tenant, process)
        return process

    def _match(self, number: int, matched: _Matched) -> None:
        if (process := self._process_of(matched.answer)) is not None:
            process.matched[number] = matched
            process.owed.append(matched.answer.tenant, number)
            self._give_work(process)

    def _process_of(self, answer: Answer) -> _Process | None:
        """The process that is to match an answer; None where its grammar is refused, which it is told."""
        if reason := self._known(answer.grammar, answer.tenant):
            answer.fail(too_costly(reason, answer.grammar.rules))
            return None
        return self._process(answer.grammar, answer.tenant, lambda: answer.effort)

    def _accept(self, number: int, grammar: Grammar, token: int) -> None:
        process = self._grammars.get(grammar)
        if process is None or number not in process.matched:
            return  # it has failed
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
        """Why a grammar is refused: it was too costly to compile, or to match in an answer of this tenant's. What an
        answer of one tenant has made costly need not be so for others."""
        digest = _digest(grammar)
        return self._too_costly.get((None, digest)) or self._too_costly.get((tenant, digest))

    def _remember(self, grammar: Grammar, tenant: str | None, reason: str) -> None:
        self._too_costly[tenant, _digest(grammar)] = reason
        while len(self._too_costly) > REMEMBERED:
            self._too_costly.popitem(last=False)

    # -- processes, on the thread ------------------------------------------------------------------------------------

    def _start_some(self) -> None:
        if not any(self._queued.values()):
            return
        if self._forker.connection is None:
            try:
                self._selector.register(self._forker.start(), selectors.EVENT_READ, self._hear_forker)
            except OSError as error:
                self._not_started(str(error))
        if not self._forker.is_ready:
            return
        for effort, queued in self._queued.items():
            compiling = [p for p in self._grammars.values() if p.effort == effort and p.connection and not p.compiled]
            in_use = Counter(process.tenants[0] for process in compiling)
            while (process := queued.pop(in_use)) is not None:
                for tenant in process.tenants:
                    queued.remove(tenant, process)
                in_use[process.tenants[0]] += 1
                self._fork(process)

    def _fork(self, process: _Process) -> None:
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # it has ended, which will be told
            self._forker.fork(theirs.fileno(), process)
        process.connection = Connection(ours.detach())
        self._works(process)
        self._selector.register(process.connection, selectors.EVENT_READ, partial(self._hear, process))
        seconds = COMPILE_SECONDS[process.effort]
        self._send(process, Compile(*process.grammar, NICENESS, seconds, MATCH_SECONDS, MEMORY_BYTES))

    def _send(self, process: _Process, message: Compile | Match) -> None:
        """Only to one that waits for it: another may be stopped, and would keep this thread waiting."""
        assert process.connection is not None
        with suppress(OSError):  # it has ended, which will be told
            process.connection.send(message)

    def _hear(self, process: _Process) -> None:
        """Takes a process's answer. Its end is told by the one that it was forked from."""
        if process.connection is None:
            return  # it was ended just now
        try:
            answer = process.connection.recv_bytes()
        except (EOFError, OSError):
            with suppress(KeyError):  # heard before
                self._selector.unregister(process.connection)
            return
        kind, rest = answer[:1], answer[1:]
        self._busy.discard(process)
        if process in self._slow:
            process.lower_priority(0)
            process.signal(signal.SIGCONT)  # it may have been stopped since it has answered
        if not process.compiled:
            self._queued[process.effort].had(process.tenants[0])
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
        tokens = [] if number is None else process.matched[number].new
        self._works(process)
        self._send(process, Match(number, tokens, process.ended))
        process.ended = []
        if number is not None:
            process.matched[number].new = []

    def _end_unwanted(self) -> None:
        """Ends compilations that nobody waits for any more, and the processes that were used least recently, where
        those without use take more memory than they may."""
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
            self._queued[process.effort].remove(tenant, process)

    def _give_up(self, process: _Process, error: RequestError, no_fault: str | None = None) -> None:
        """Tells everybody that there will be no such grammar; ``no_fault`` says why where that is not its."""
        self._forget(process)
        for waiter in process.waiters:
            settle(waiter, error)
        for matched in process.matched.values():
            matched.answer.fail(error if no_fault is None else not_followed(no_fault, process.grammar.rules))
        process.waiters, process.matched = [], {}

    def _works(self, process: _Process) -> None:
        process.began, process.had = time.monotonic(), process.seconds()
        self._busy.add(process)

    def _share_out(self, now: float) -> float | None:
        """Has slow work take turns; returns in how many seconds that is to be looked at again."""
        slow = {process for process in self._busy if process.is_slow(now)}
        due = [QUICK_SECONDS] if any(process.pid for process in self._busy - slow) else []
        for process in slow - self._slow:
            if process.compiled:
                process.lower_priority(NICENESS)
        if slow != self._slow or now >= self._turn_ends:
            self._slow, self._turn_ends = slow, now + TURN_SECONDS
            chosen = self._turns.change(sorted(slow, key=lambda process: process.began), now)
            for process in slow:
                process.signal(signal.SIGCONT if process in chosen else signal.SIGSTOP)
        if slow:
            due.append(self._turn_ends - now)
        if (late_in := self._forker.late_in(now)) is not None:
            due.append(late_in)
            if late_in <= 0:
                self._not_started("it takes too long")
        return max(0.0, min(due)) if due else None

    # -- what ends, on the thread ------------------------------------------------------------------------------------

    def _hear_forker(self) -> None:
        if self._forker.connection is None:
            return  # it was ended just now
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
            if self._grammars.get(process.grammar) is not process:  # by now nobody wants it
                process.signal(signal.SIGKILL)
        elif (ended := self._by_pid.pop(pid, None)) is not None:
            if ended in self._busy and ended.connection is not None and ended.connection.poll():
                self._hear(ended)  # its last answer: both may be there at once
            self._has_ended(ended, code, f"exit code {code}" if code >= 0 else signal.Signals(-code).name)

    def _not_started(self, how: str) -> None:
        self._end_forker()
        self._refuse_all(f"a process for it has not started ({how})")

    def _end_forker(self) -> None:
        if self._forker.connection is not None:
            with suppress(KeyError):  # it has not been registered
                self._selector.unregister(self._forker.connection)
        for process in self._by_pid.values():
            process.signal(signal.SIGKILL)
        self._forker.end()
        self._by_pid.clear()

    def _refuse_all(self, reason: str) -> None:
        for process in [*self._grammars.values()]:
            self._disconnect(process)
            self._give_up(process, not_compiled(reason, process.grammar.rules), reason)

    def _disconnect(self, process: _Process) -> None:
        self._busy.discard(process)
        if process.connection is not None:
            with suppress(KeyError):
                self._selector.unregister(process.connection)
            process.connection.close()
            process.connection, process.pid = None, None

    def _has_ended(self, process: _Process, code: int | None, how: str) -> None:
        """Sees to those who need a process that has ended, with an exit code; None where all have, with the forker."""
        self._disconnect(process)
        if self._grammars.get(process.grammar) is not process:
            return  # nobody needs it
        number, reason, rules = process.current, _reason(code, how, process), process.grammar.rules
        too_much = code in (-signal.SIGPROF, OUT_OF_MEMORY)
        if not process.compiled:
            self._queued[process.effort].had(process.tenants[0])
            if too_much:
                self._remember(process.grammar, None, reason)
                self._give_up(process, too_costly(reason, rules))
            else:
                self._give_up(process, not_compiled(reason, rules), reason)
            return
        self._forget(process)
        owed = {*process.owed.clear(), number}
        if too_much and number is not None and number in process.matched:
            answer = process.matched.pop(number).answer
            if code != OUT_OF_MEMORY or not process.matched:  # memory is that of all its answers
                self._remember(process.grammar, answer.tenant, reason)
            answer.fail(too_costly(reason, rules))
        for number, matched in process.matched.items():
            self._go_on(number, matched, number in owed, reason)

    def _go_on(self, number: int, matched: _Matched, owed: bool, reason: str) -> None:
        """Goes on with an answer in another process."""
        matched.deaths += 1
        answer = matched.answer
        if matched.deaths > MAX_DEATHS:
            answer.fail(not_followed(reason, answer.grammar.rules))
            return
        if (process := self._process_of(answer)) is None:
            return
        matched.new = [*matched.tokens]
        process.matched[number] = matched
        if owed:
            process.owed.append(answer.tenant, number)
        self._give_work(process)


def _reason(code: int | None, how: str, process: _Process) -> str:
    """Why a process has ended."""
    what = "finding what may come next takes" if process.compiled else "compiling it takes"
    if code == -signal.SIGPROF:
        seconds = MATCH_SECONDS if process.compiled else COMPILE_SECONDS[process.effort]
        return f"{what} more than {counted(round(seconds), 'second')}"
    if code == OUT_OF_MEMORY:
        return f"{what} more than {MEMORY_BYTES / 2**30:g} GiB of memory"
    return f"the process that {'matched' if process.compiled else 'compiled'} it has ended ({how})"


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.one_line} {grammar.rules}".encode("utf-8", "surrogatepass")).digest()
