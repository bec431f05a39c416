"""Schemas that never compile: the processes that try them are ended, and nobody else waits."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import psutil
import pytest

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.request import RequestError, SchemaTimeout
from shadowkv.engine.startup.loading import tokenizer_from_config
from shadowkv.engine.structured import grammar
from shadowkv.engine.structured.grammar import GrammarCompiler
from shadowkv.engine.structured.json_schema import check_schema
from shadowkv.engine.structured.trials import PROCESSES, SchemaTrials
from shadowkv.engine.structured.vocabulary import Vocabulary
from shadowkv.models.tokenization.tokenizer_files import byte_tokenizer

SHORT = 0.2
SECONDS = 60
"""Most that anything takes, on any machine."""
HOSTILE = '{"type": "string", "pattern": "(.{0,3}a?){0,20}"}'
"""For tokens of several letters: with bytes it takes milliseconds."""

HELD = f"""
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import tokenizer_from_config
from shadowkv.engine.structured import grammar
grammar.SECONDS["medium"] = 1000.0
grammar.GrammarCompiler(tokenizer_from_config(EngineConfig(device="cpu")), 49_152, frozenset([2])).compile({HOSTILE!r})
"""
MODULE = "shadowkv.engine.structured.trial_process"


def processes(of: int | None = None, module: str = "trial_stub") -> list[psutil.Process]:
    """Those of a process that try schemas."""
    found = []
    for child in psutil.Process(of).children():
        with suppress(psutil.Error):
            if module in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def wait_until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def trials() -> Iterator[SchemaTrials]:
    trials = SchemaTrials(lambda: Vocabulary(["a"], True, [0]), "trial_stub")
    yield trials
    trials.close()
    assert not processes()


def test_one_that_never_compiles_is_refused_and_remembered(trials: SchemaTrials) -> None:
    trials.run("fine", False, SECONDS)
    (process,) = processes()
    with pytest.raises(SchemaTimeout, match="compiling it takes more than 1 second; use simpler"):
        trials.run("hang", False, 1.0)
    assert not process.is_running()
    begin = time.monotonic()
    with pytest.raises(SchemaTimeout, match="takes more than"):
        trials.run("hang", False, SECONDS)
    assert time.monotonic() - begin < 1 and not processes()
    trials.run("another", False, SECONDS)
    assert len(processes()) == 1
    trials.run("a third", False, SECONDS)
    assert len(processes()) == 1


@pytest.mark.parametrize(
    "rules, what, advice, param",
    [
        ("hang", "JSON schema", "fewer properties", "response_format"),
        ("regex:hang", "regex", "use a simpler one$", "structured_outputs"),
        ("grammar:hang", "grammar", "use a simpler one$", "structured_outputs"),
    ],
)
def test_it_is_told_what_takes_too_long(trials: SchemaTrials, rules: str, what: str, advice: str, param: str) -> None:
    with pytest.raises(SchemaTimeout, match=f"^the {what} cannot be followed: compiling it .*{advice}") as caught:
        trials.run(rules, False, SHORT)
    assert caught.value.param == param


def test_one_whose_process_dies_is_refused_and_the_next_is_not(trials: SchemaTrials) -> None:
    with pytest.raises(SchemaTimeout, match=r"has ended \(SIGKILL\)"):
        trials.run("die", False, SECONDS)
    trials.run("fine", False, SECONDS)
    (process,) = processes()
    process.kill()  # idle: no schema's fault
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    trials.run("another", False, SECONDS)


def test_nine_at_once_are_tried_two_at_a_time(trials: SchemaTrials) -> None:
    most = 0
    with ThreadPoolExecutor(9) as threads:
        answers = [threads.submit(trials.run, f"hang {number}", False, SHORT) for number in range(9)]
        while not all(answer.done() for answer in answers):
            most = max(most, len(processes()))
            time.sleep(0.01)
        assert all(isinstance(answer.exception(), SchemaTimeout) for answer in answers)
    assert most == PROCESSES
    trials.run("fine", False, SECONDS)


def test_closing_ends_what_is_tried(trials: SchemaTrials) -> None:
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(trials.run, "hang", False, SECONDS)
        wait_until(processes)
        trials.close()
        with pytest.raises(SchemaTimeout, match="being shut down"):
            answer.result(SECONDS)
    with pytest.raises(SchemaTimeout, match="being shut down"):
        trials.run("fine", False, SECONDS)


def test_a_process_that_does_not_start_is_no_schemas_fault() -> None:
    trials = SchemaTrials(lambda: Vocabulary(["a"], True, [0]), "no_such_module")
    for _ in range(2):
        with pytest.raises(SchemaTimeout, match="a process for it has not started"):
            trials.run("fine", False, SECONDS)
    assert not processes(module="no_such_module") and not trials._outcomes


@pytest.mark.parametrize(
    ("schema", "effort"),
    [
        ('{"type": "integer"}', "small"),
        ('{"properties": {"pattern": {"type": "string"}}}', "small"),
        (HOSTILE, "medium"),
        ('{"$ref": "#/a/0", "a": [{"pattern": "a?"}]}', "medium"),
        ('{"propertyNames": {"maxLength": 3}}', "medium"),
        ('{"patternProperties": {"a": {}}}', "medium"),
        ('{"properties": {"a": {}}, "minProperties": 1}', "medium"),
        ('{"maxLength": 60}', "medium"),
        ('{"maxLength": 900}', "large"),
        ('{"pattern": "a{900}"}', "large"),
    ],
)
def test_how_much_effort_a_schema_may_take(schema: str, effort: str) -> None:
    assert check_schema(schema).effort == effort


def test_the_compiler_tries_patterns_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    others = processes(module=MODULE)  # of an engine that other tests share
    compiler = GrammarCompiler(tokenizer_from_config(EngineConfig(device="cpu")), 49_152, frozenset([2]))
    try:
        compiler.compile('{"type": "integer"}')
        assert processes(module=MODULE) == others
        compiler.compile('{"type": "string", "pattern": "^[a-z]{3}$"}')
        assert compiler.has('{"type": "string", "pattern": "^[a-z]{3}$"}', False)
        (process,) = [one for one in processes(module=MODULE) if one not in others]
        assert process.nice() > psutil.Process().nice()
        with pytest.raises(RequestError, match="xgrammar") as refused:  # as without a trial
            compiler.compile('{"type": "string", "pattern": "^.{1,200}$"}')
        assert not isinstance(refused.value, SchemaTimeout)
        monkeypatch.setitem(grammar.SECONDS, "medium", 0.5)
        with pytest.raises(SchemaTimeout, match="compiling it takes more than"):
            compiler.compile(HOSTILE)
        assert not compiler.has(HOSTILE, False)
    finally:
        compiler.trials.close()
    assert processes(module=MODULE) == others


def test_a_trial_ends_with_the_process_that_asked_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD]) as asks:
        try:
            found = partial(processes, asks.pid, MODULE)
            wait_until(found)
            (process,) = found()
            wait_until(lambda: process.cpu_times().user > 4)  # it compiles by now
        finally:
            asks.kill()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_tokenizer(300, [256]), 300, frozenset([256]))
    schemas = [f'{{"enum": ["{number}"]}}' for number in range(4)]
    compiler.compile(schemas[0])
    monkeypatch.setattr(grammar, "KEPT_BYTES", 3 * compiler._kept_bytes)
    for schema in schemas[1:3]:
        compiler.compile(schema)
    assert compiler.has(schemas[0], False)  # used last now
    compiler.compile(schemas[3])
    assert [compiler.has(schema, False) for schema in schemas] == [True, False, True, True]
    assert not compiler.has(schemas[0], True)
