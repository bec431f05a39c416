"""A warm-up runs what first requests would compile or plan, and leaves an engine as if it had not been."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from test_engine import GREEDY, assert_empty, drain, prompt, tokens
from test_faults import fail_next_prefill

from shadowkv.engine import warmup
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.process import core as engine_core
from shadowkv.engine.request import EngineDead
from shadowkv.engine.warmup import use_everything_once, warm_up
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.layers.group import RankFailure
from tests.local_engine import LocalEngine

OPTIONS = [{"max_num_seqs": 1, "max_cached_seqs": 0}, {"max_model_len": 130}, {"max_model_len": 9}]


@pytest.fixture(scope="module")
def tiny(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 16 dimensions, as rotated values need them."""
    folder = tmp_path_factory.mktemp("tiny")
    config = {**json.loads((tiny / "config.json").read_text()), "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def small_blocks_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(warmup.BLOCK_TOKENS, "cpu", 256)


def assert_unused(engine: Engine) -> None:
    assert not len(engine.scheduler.prefix_cache)
    assert_empty(engine)
    assert engine.stats().fetches == FetchCounts()


def answers(engine: Engine) -> list[list[int]]:
    for number, length in enumerate((30, 900, 5)):
        engine.add_request(str(number), prompt(number, length), GREEDY)
    return [tokens(one) for _, one in sorted(drain(engine).items())]


@pytest.mark.parametrize("kv", ["full", "shadowkv", "turbo", "turbo-host", "quest"])
def test_it_uses_everything_once_and_leaves_nothing_behind(make: Any, monkeypatch: pytest.MonkeyPatch, kv: str) -> None:
    engine, untouched = make(kv=kv), make(kv=kv)
    prompts, compressed = [], []
    prefill, plan = engine.runner.prefill, engine.cache.plan_decode

    def watched(work: Any, scored: bool) -> Any:
        prompts.append([len(tokens) for _, tokens in work])
        return prefill(work, scored)

    def planned(*what: Any) -> Any:
        before = [one.compressed for sequence in what[0] for one in (sequence, *sequence.other_groups)]
        made = plan(*what)
        after = [one.compressed for sequence in what[0] for one in (sequence, *sequence.other_groups)]
        compressed.append(before != after)
        return made

    monkeypatch.setattr(engine.runner, "prefill", watched)
    monkeypatch.setattr(engine.cache, "plan_decode", planned)
    use_everything_once(engine)
    longest = max(560, engine.cache.spec.dense_limit + 64) if engine.cache.spec.compresses else 560
    assert prompts[:3] == [[48], [48, 24], [longest]]
    assert len(prompts[3]) == 1 and prompts[3][0] <= 64, "the start that it shares was computed again"
    assert prompts[4] == [9], "a later turn computes what is new, and the last token of the answer"
    assert prompts[5:] == [[48], [9], [1], [24]], "of the last two prompts, all but one token of the first is cached"
    assert any(compressed) == (kv != "full")
    assert_unused(engine)
    assert answers(engine) == answers(untouched)


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1, "max_cached_seqs": 0}, {"max_model_len": 130}, {"max_model_len": 9}]
)
def test_small_engines(make: Any, caplog: pytest.LogCaptureFixture, options: dict[str, int]) -> None:
    engine = make(kv="turbo", **options)
    use_everything_once(engine)
    assert_unused(engine)
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_prefill_that_fails_leaves_nothing_behind(make: Any, caplog: pytest.LogCaptureFixture, number: int) -> None:
    engine = make(kv="shadowkv")
    start = engine.prefill_queue.start
    calls = []

    def starts(*args: Any) -> None:
        if engine.scheduler.waiting and not engine.prefill_queue.in_flight:  # on a slow machine one takes several steps
            calls.append(1)
            if len(calls) == number + 1:
                fail_next_prefill(engine, 1, MemoryError("none left"))
        start(*args)

    engine.prefill_queue.start = starts
    use_everything_once(engine)
    assert len(calls) == number + 1
    assert any("warm-up ended early" in record.getMessage() for record in caplog.records)
    assert_unused(engine)


@pytest.mark.parametrize("after", [0, 3, 20])
def test_a_step_that_fails_leaves_nothing_behind(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    engine, steps = make(kv="shadowkv"), []
    decode = engine.runner.decode

    def broken(*args: Any) -> Any:
        steps.append(args)
        if len(steps) > after:
            raise SystemError("boom")
        return decode(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", broken)
        use_everything_once(engine)
    assert any("boom" in record.getMessage() for record in caplog.records)
    assert_unused(engine)
    assert answers(engine) == answers(make(kv="shadowkv"))


def test_without_another_rank_it_does_not_end_as_if_first_requests_were_only_slower(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RankFailure("rank 1 has ended")

    engine = make(kv="full")
    monkeypatch.setattr(engine.runner, "decode", broken)
    with pytest.raises(RankFailure, match="rank 1 has ended"):
        use_everything_once(engine)


@pytest.mark.parametrize("after", [1, 4, 20])
def test_ctrl_c_ends_it_between_two_steps(make: Any, after: int) -> None:
    engine, steps = make(kv="shadowkv"), []
    step = engine.step

    def interrupted() -> Any:
        steps.append(1)
        if len(steps) == after:
            signal.raise_signal(signal.SIGINT)
        return step()

    engine.step = interrupted
    try:
        use_everything_once(engine)
    except KeyboardInterrupt:  # whose traceback has all frames: nothing may wait for their end
        assert_unused(engine)
    assert len(steps) == after
    assert_unused(engine)


def test_it_ends_when_it_is_told_to(make: Any) -> None:
    engine, pieces = make(kv="shadowkv"), []
    use_everything_once(engine, lambda: pieces.append(1) or len(pieces) > 6)
    assert len(pieces) == 7
    assert_unused(engine)


def test_it_says_how_long_it_took(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shadowkv.engine"):
        use_everything_once(make(kv="full"))
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "warming up" and last.startswith("warmed up in ")


def test_a_cpu_is_not_warmed_up(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(warmup, "use_everything_once", lambda *args: called.append(args))
    warm_up(make())
    assert not called


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shadowkv-engine"]


@pytest.fixture
def served(tiny: Path) -> Any:
    engine = LocalEngine(EngineConfig(model=str(tiny), load_format="dummy", max_num_seqs=2))
    yield engine
    engine.shutdown(10)
    assert not engine_threads()


def test_a_server_starts_once_its_own_thread_is_warm(served: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(engine_core, "warm_up", lambda *how: threads.append(threading.current_thread()))
    served.start()
    assert threads == engine_threads() and served.is_alive


def test_a_ctrl_c_while_a_server_warms_up_ends_its_thread(served: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(engine: Engine, stopped: Any, seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not stopped():
            pass

    monkeypatch.setattr(engine_core, "warm_up", endless)
    with pytest.raises(KeyboardInterrupt):
        served.start()
    assert not engine_threads()


def test_a_server_whose_warm_up_dies_does_not_start(served: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*how: Any) -> None:
        raise SystemError("no device")

    monkeypatch.setattr(engine_core, "warm_up", die)
    with pytest.raises(EngineDead, match="no device"):
        served.start()


def test_a_server_captures_more_while_it_is_idle(served: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own thread, one by one, until there is nothing left; then it waits for requests again."""
    threads, done = [], threading.Event()

    class Grid:
        def capture(self) -> bool:
            threads.append(threading.current_thread())
            if len(threads) == 5:
                done.set()
            return len(threads) < 5

    monkeypatch.setattr(engine_core, "warm_up", lambda *how: Grid())
    served.start()
    assert done.wait(60) and threads == engine_threads() * 5 and served.is_alive
