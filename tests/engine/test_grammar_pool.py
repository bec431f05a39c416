"""Grammars that never compile or take forever to match: their processes are ended, and nobody else waits."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress

import psutil
import pytest
import torch

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.request import RequestError, SchemaTimeout
from shadowkv.engine.startup.loading import tokenizer_from_config
from shadowkv.engine.structured import grammar_pool
from shadowkv.engine.structured.grammar import GrammarConstraint, Grammars
from shadowkv.engine.structured.grammar_pool import Grammar, GrammarPool
from shadowkv.engine.structured.vocabulary import Vocabulary
from tests.grammar_answers import SECONDS, accepts, begun
from tests.waiting import wait_until

MODULE = "shadowkv.engine.structured.grammar_process"
HOSTILE = '{"type": "string", "pattern": "(.{0,3}a?){0,20}"}'
"""For tokens of several letters: with bytes it takes milliseconds."""
AMBIGUOUS = "grammar:root ::= s\ns ::= s s | [^x]"
"""Compiled at once; each letter of an answer takes longer than the last."""
NESTED = 'grammar:root ::= (((("a"{0,1000}){0,1000}){0,1000}){0,1000}){0,1000}'
"""Compiled at once; a token of several letters takes seconds."""
LETTERS = "grammar:root ::= [a-c]{40}"

HELD = f"""
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import tokenizer_from_config
from shadowkv.engine.structured import grammar, grammar_pool
grammar_pool.ATTEMPTS = ((1000.0, 6),)
grammars = grammar.Grammars(tokenizer_from_config(EngineConfig(device="cpu")), 49_152, frozenset([2]))
grammars.compile({HOSTILE!r}).result()
"""


def status(process: psutil.Process) -> str:
    """Psutil's word for it; one that ends while it is asked for is as good as reaped."""
    with suppress(psutil.NoSuchProcess):
        return str(process.status())
    return str(psutil.STATUS_ZOMBIE)


def processes(of: int | None = None) -> list[psutil.Process]:
    """Of a process, the one that grammars' are forked from, and those."""
    found = []
    for child in psutil.Process(of).children(recursive=True):
        with suppress(psutil.Error):
            if MODULE in child.cmdline() and status(child) != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


@pytest.fixture(scope="module")
def shared() -> Iterator[Grammars]:
    """Of SmolLM2's tokens."""
    grammars = Grammars(tokenizer_from_config(EngineConfig(device="cpu")), 49_152, frozenset([2]))
    yield grammars
    grammars.pool.close()


@pytest.fixture
def grammars(shared: Grammars) -> Grammars:
    """The same, with processes that run."""
    shared.compile("{}").result(SECONDS)
    return shared


def mine(before: set[int]) -> list[psutil.Process]:
    """Processes that were not there before."""
    return [process for process in processes() if process.pid not in before]


def next_token(answer: GrammarConstraint) -> int:
    """One of several that may come next."""
    logits = torch.zeros(49_152)
    answer.mask(logits)
    may = (logits == 0).nonzero().flatten().tolist()
    return int(may[len(may) // 2])


def follow(answer: GrammarConstraint, tokens: int) -> list[int]:
    """Goes on with an answer, by the first token of several that may come next; returns them."""
    taken: list[int] = []
    while len(taken) < tokens and answer.failure is None:
        taken.append(next_token(answer))
        assert accepts(answer, taken[-1])
    return taken


def test_one_that_never_compiles_is_refused_and_remembered(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((0.1, 6), (1.0, 2)))
    before = {process.pid for process in processes()}
    with pytest.raises(SchemaTimeout, match="compiling it takes more than 1 second; use simpler"):
        grammars.compile(HOSTILE).result(SECONDS)
    wait_until(lambda: not mine(before))
    with pytest.raises(SchemaTimeout, match="takes more than"):
        grammars.compile(HOSTILE, tenant="another").result(SECONDS)
    assert not mine(before)
    grammars.compile('{"type": "string", "pattern": "^[a-z]{3}$"}').result(SECONDS)
    assert len(mine(before)) == 1


@pytest.mark.parametrize(
    "rules, what, advice, param",
    [
        (f'{{"items": {HOSTILE}}}', "JSON schema", "fewer properties", "response_format"),
        (f"regex:{'(a|b)?' * 300}", "regex", "use a simpler one$", "structured_outputs"),
        (f"grammar:root ::= {'[a-z]? ' * 400}", "grammar", "use a simpler one$", "structured_outputs"),
    ],
)
def test_it_is_told_what_takes_too_long(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, rules: str, what: str, advice: str, param: str
) -> None:
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((0.2, 6),))
    with pytest.raises(SchemaTimeout, match=f"^the {what} cannot be followed: compiling it .*{advice}") as caught:
        grammars.compile(rules).result(SECONDS)
    assert caught.value.param == param


def test_one_that_takes_too_much_memory_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "MEMORY_BYTES", 2**24)
    strings = [{"type": "string", "maxLength": 20 + number} for number in range(60)]
    with pytest.raises(SchemaTimeout, match=r"compiling it takes more than 0\.015625 GiB of memory"):
        grammars.compile(str({"anyOf": strings}).replace("'", '"')).result(SECONDS)


@pytest.mark.parametrize("rules", [AMBIGUOUS, NESTED])
def test_an_answer_that_takes_too_long_to_match_is_ended(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, rules: str
) -> None:
    monkeypatch.setattr(grammar_pool, "MATCH_SECONDS", 0.5)
    costly = begun(grammars, rules)
    follow(costly, 100)
    assert costly.failure is not None and "matching the answer takes more than" in str(costly.failure)


def test_others_of_its_grammar_go_on(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "MATCH_SECONDS", 1.0)
    other, mild, costly = (begun(grammars, AMBIGUOUS, tenant=tenant) for tenant in "bba")
    follow(mild, 2)
    follow(costly, 100)
    assert costly.failure is not None
    with pytest.raises(SchemaTimeout, match="matching the answer takes more than 1 second; use a simpler one"):
        grammars.compile(AMBIGUOUS, tenant="a").result(SECONDS)
    grammars.compile(AMBIGUOUS, tenant="b").result(SECONDS)  # who has done no such thing
    for answer in (other, mild):
        assert len(follow(answer, 1)) == 1 and answer.failure is None
        answer.close()


@pytest.mark.parametrize("killed", ["its own", "the one that it was forked from"])
def test_an_answer_goes_on_where_its_process_is_killed(grammars: Grammars, killed: str) -> None:
    undisturbed, disturbed = begun(grammars, LETTERS), begun(grammars, LETTERS)
    expected = follow(undisturbed, 12)
    assert follow(disturbed, 4) == expected[:4]
    forker = min(processes(), key=lambda process: process.create_time())
    victims = forker.children() if killed == "its own" else [forker]
    for process in victims:
        process.kill()
    assert follow(disturbed, 8) == expected[4:]
    wait_until(lambda: not any(process.is_running() for process in victims))
    for answer in (undisturbed, disturbed):
        assert len(follow(answer, 1)) == 1 and answer.failure is None
        answer.close()


def test_a_compilation_that_nobody_waits_for_is_ended(grammars: Grammars) -> None:
    before = {process.pid for process in processes()}
    compiling = grammars.compile('{"type": "string", "pattern": "(.{0,3}a?){0,21}"}')
    wait_until(lambda: mine(before))
    assert compiling.cancel()
    wait_until(lambda: not mine(before))
    with pytest.raises(CancelledError):
        compiling.result()


def test_a_compilation_whose_process_is_killed_is_refused(grammars: Grammars) -> None:
    before = {process.pid for process in processes()}
    compiling = grammars.compile('{"type": "string", "pattern": "(.{0,3}a?){0,22}"}')
    wait_until(lambda: mine(before))
    mine(before)[0].kill()
    with pytest.raises(SchemaTimeout, match=r"has ended \(SIGKILL\)"):
        compiling.result(SECONDS)


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time of a process; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return float(sum(process.cpu_times()[:2]))
    return 0.0


def thread_priorities(process: psutil.Process) -> list[int]:
    """One for each of a process's threads; none if it has ended."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        return [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()]
    return []


def test_quick_ones_go_on_beside_slow_ones_of_which_two_run(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((0.1, 6), (0.2, 2), (1000.0, 3)))
    quick = begun(grammars, LETTERS)
    before = {process.pid for process in processes()}
    patterns = [f'{{"type": "string", "pattern": "(.{{0,3}}a?){{0,30}}{number}"}}' for number in range(6)]
    slow = [grammars.compile(pattern, tenant="abcabc"[number]) for number, pattern in enumerate(patterns)]
    wait_until(lambda: len([one for one in mine(before) if status(one) == psutil.STATUS_STOPPED]) == 1)
    lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + grammar_pool.NICENESS)
    wait_until(lambda: sum(lowered in thread_priorities(one) for one in mine(before)) == 3)
    assert len(follow(quick, 20)) == 20 and not any(one.done() for one in slow)
    quick.close()
    for one in slow:
        assert one.cancel()
    wait_until(lambda: len(mine(before)) <= 1)


def test_closing_ends_what_is_compiled_and_matched() -> None:
    grammars = Grammars(tokenizer_from_config(EngineConfig(device="cpu")), 49_152, frozenset([2]))
    before = {process.pid for process in processes()}
    answer, compiling = begun(grammars, "{}"), grammars.compile(HOSTILE)
    wait_until(lambda: len(mine(before)) >= 3)
    grammars.pool.close()
    with pytest.raises(SchemaTimeout, match="being shut down"):
        compiling.result(SECONDS)
    with pytest.raises(SchemaTimeout, match="being shut down"):
        grammars.compile("{}").result(SECONDS)
    assert answer.failure is not None and "being shut down" in str(answer.failure)
    wait_until(lambda: not mine(before))


def test_a_process_that_does_not_start_is_no_grammars_fault() -> None:
    pool = GrammarPool(lambda: Vocabulary(["a"], True, [0]), "no_such_module")
    for _ in range(2):
        with pytest.raises(SchemaTimeout, match=r"the grammar process has not started \(exit code 1\)"):
            pool.compile(Grammar("{}", False), "").result(SECONDS)
    pool.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_pool_leaves_nobody_waiting() -> None:
    def fail() -> Vocabulary:
        raise SystemError("boom")

    pool = GrammarPool(fail)
    for _ in range(2):
        with pytest.raises(SchemaTimeout, match="was not compiled"):
            pool.compile(Grammar("{}", False), "").result(SECONDS)
    pool.close()


def test_they_end_with_the_process_that_asked_for_them() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD]) as asks:
        try:
            wait_until(lambda: len(processes(asks.pid)) == 2)
            forker, compiles = sorted(processes(asks.pid), key=lambda process: process.create_time())
            assert compiles.ppid() == forker.pid
            compiles.send_signal(signal.SIGSTOP)
        finally:
            asks.kill()
    for process in (forker, compiles):
        wait_until(lambda process=process: status(process) == psutil.STATUS_ZOMBIE)


def test_what_nobody_uses_is_ended_where_it_takes_more_than_may_be_kept(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_pool, "KEPT_BYTES", 0)
    before = {process.pid for process in processes()}
    used = begun(grammars, '{"enum": ["used"]}')
    kept = mine(before)
    grammars.compile('{"enum": ["not used"]}').result(SECONDS)
    wait_until(lambda: mine(before) == kept)
    assert len(kept) == 1 and len(follow(used, 1)) == 1
    used.close()


def test_ended_answers_of_a_process_that_is_stopped_delay_nobody(grammars: Grammars) -> None:
    before = {process.pid for process in processes()}
    answers = [begun(grammars, '{"enum": ["many"]}') for _ in range(400)]
    (stopped,) = mine(before)
    stopped.send_signal(signal.SIGSTOP)
    assert all(answer.accept(next_token(answer)) for answer in answers)
    for answer in answers:
        answer.close()
    another = begun(grammars, '{"enum": ["another"]}')
    assert len(follow(another, 3)) == 3
    another.close()
    stopped.send_signal(signal.SIGCONT)


def test_nothing_is_left_of_processes_that_were_stopped_as_soon_as_they_were_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_pool, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(grammar_pool, "SLOW_AT_ONCE", 0)
    grammars = Grammars(tokenizer_from_config(EngineConfig(device="cpu")), 49_152, frozenset([2]))
    before = {process.pid for process in processes()}
    grammars.compile(HOSTILE)
    wait_until(lambda: [one for one in mine(before) if status(one) == psutil.STATUS_STOPPED])
    (stopped,) = (one for one in mine(before) if status(one) == psutil.STATUS_STOPPED)
    grammars.pool.close()
    wait_until(lambda: status(stopped) == psutil.STATUS_ZOMBIE)


def test_a_grammar_that_two_tenants_wait_for_starts_at_the_turn_of_either(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((1000.0, 6),))
    patterns = [f'{{"type": "string", "pattern": "(.{{0,3}}a?){{0,30}}waits {number}"}}' for number in range(6)]
    public = '{"type": "string", "pattern": "^[a-z]{3} public$"}'
    slow = [grammars.compile(pattern, tenant="a") for pattern in patterns]
    asked = [grammars.compile(public, tenant=tenant) for tenant in "ab"]
    for one in asked:
        one.result(SECONDS)
    assert not any(one.done() for one in slow)
    for one in slow:
        assert one.cancel()


def test_slow_ones_take_turns_by_tenant(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "ATTEMPTS", ((0.1, 6), (0.2, 2), (1000.0, 3)))
    monkeypatch.setattr(grammar_pool, "TURN_SECONDS", 0.02)
    before = {process.pid for process in processes()}
    patterns = [f'{{"type": "string", "pattern": "(.{{0,3}}a?){{0,30}}turns {number}"}}' for number in range(3)]
    slow = [grammars.compile(pattern, tenant=tenant) for pattern, tenant in zip(patterns, "abc", strict=True)]
    wait_until(lambda: len(mine(before)) == 3 and all(cpu_seconds(one) > 0.3 for one in mine(before)))
    assert not any(one.done() for one in slow)
    for one in slow:
        assert one.cancel()


class LateSelector(selectors.DefaultSelector):
    """Looks so late that all has come, and shows one thing at a time, what was registered first before others: that a
    process has ended before what it has said."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        time.sleep(0.1)
        return sorted(super().select(timeout), key=lambda ready: ready[0].fd)[:1]


def test_a_refusal_is_heard_although_its_process_has_ended(monkeypatch):
    monkeypatch.setattr(selectors, "DefaultSelector", LateSelector)
    grammars = Grammars(tokenizer_from_config(EngineConfig(device="cpu")), 49_152, frozenset([2]))
    try:
        with pytest.raises(RequestError, match="cannot be followed"):
            grammars.compile("grammar:a").result(SECONDS)
    finally:
        grammars.pool.close()
