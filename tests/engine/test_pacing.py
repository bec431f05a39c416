"""Time that a prefill takes from decode steps is the device's, not that of its launches."""

import copy
import time
from typing import Any

import pytest
import torch
from test_faults import Graph, with_graphs

from shadowkv import SamplingParams
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.execution.runner import kinds
from shadowkv.engine.scheduling import pacing
from shadowkv.engine.scheduling.pacing import RECENT_TOKENS, Mark, Pace, Stopwatch
from shadowkv.engine.scheduling.prefill_queue import PrefillQueue
from shadowkv.kvcache.decode.decode_batch import DecodePlan


def test_a_cpus_time_is_the_hosts() -> None:
    watch = Stopwatch(torch.device("cpu"))
    time.sleep(0.2)
    assert 0.2 <= watch.passed() <= watch.passed()
    before = time.monotonic()
    watch.start()
    assert watch.passed() <= time.monotonic() - before
    time.sleep(0.1)
    assert watch.launched() >= watch.piece >= 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_time_is_that_of_its_work_up_to_the_call_before() -> None:
    device, cycles = torch.device("cuda"), 50_000_000
    torch.cuda._sleep(cycles)  # before the start: does not count
    start = Mark(device)
    torch.cuda._sleep(cycles)
    one = Mark(device).since(start)
    watch, found = Stopwatch(device), []
    for _ in range(4):
        torch.cuda._sleep(cycles)
        found.append(watch.passed())
    assert found[0] == 0
    assert found[1:] == pytest.approx([one, 2 * one, 3 * one], rel=0.3)
    torch.cuda._sleep(cycles)
    assert watch.launched() == pytest.approx(5 * one, rel=0.3)
    assert watch.piece == pytest.approx(one, rel=0.3)
    watch.start()
    assert watch.launched() == watch.piece, "of a first piece nothing is known but what the last one took"


def test_one_long_piece_does_not_make_all_rounds_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of pieces that are launched until another would take more than 60 ms; the third one takes 50."""
    clock = [0.0]

    class Moment:
        """Of a device that works at what is launched as soon as it is."""

        def __init__(self, device: torch.device) -> None:
            self.time = clock[0]

        def since(self, other: "Moment") -> float:
            return self.time - other.time

    monkeypatch.setattr(pacing, "Mark", Moment)
    watch, rounds = Stopwatch(torch.device("cuda")), []
    pieces = iter([0.005, 0.005, 0.05] + [0.005] * 100)
    for _ in range(6):
        watch.start()
        count = 0
        while True:
            clock[0] += next(pieces)
            count += 1
            if watch.launched() + watch.piece >= 0.06:
                break
        rounds.append(count)
        clock[0] += 0.01  # a decode step
    assert min(rounds[2:]) >= 10, rounds


def test_a_step_whose_graph_was_captured_does_not_say_how_long_steps_take(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill would get as long behind it, and the gap after a capture be as wide as the one with it."""
    engine, now, passed = make(kv="full"), time.monotonic, [0.0]
    runner = engine.runner
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed[0])

    class Slow:
        """Captures at the first step of two sequences, which takes an hour."""

        captures, eager_runs, compress = 0, 0, None

        def has(self, plan: DecodePlan) -> bool:
            return True

        def run(self, plan: DecodePlan, tokens: list[int], sources: list[int], new: Any, ids: Any) -> Any:
            if new:
                return None
            if len(tokens) == 2 and not self.captures:
                self.captures += 1
                passed[0] += 3600
            return runner.step(plan, None, torch.tensor([tokens, sources], device=runner.cache.device))

    runner.graphs, engine.decode_steps.run_ahead = Slow(), True
    params, seconds = SamplingParams(max_tokens=12, ignore_eos=True), []
    engine.add_request("a", [5] * 20, params)
    for number in range(8):
        if number == 3:
            engine.add_request("b", [6] * 30, params)
        engine.step()
        seconds.append(engine.decode_steps.seconds)
    assert runner.captures == 1
    assert min(seconds[1:]) > 0 and max(seconds) < 1800  # a GPU may begin with the prefill alone


def test_a_pace_is_that_of_recent_prompts() -> None:
    pace = Pace()
    assert (pace.seconds(1), pace.tokens(5.0)) == (float("inf"), 0)
    pace.add(100, 0.2)
    assert pace.seconds(50) == pytest.approx(0.1) and pace.tokens(0.1) == 50
    pace.add(300, 0.2)
    assert pace.seconds(400) == pytest.approx(0.4, rel=0.02), "a mean over tokens"
    pace.add(RECENT_TOKENS, 1.0)
    assert pace.seconds(RECENT_TOKENS) == pytest.approx(1.0)
    pace.forget()
    assert pace.seconds(1) == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a clock of its own")
def test_what_prompts_add_to_a_step_is_their_pace(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 5 s, and 2 more with a prompt of 50 tokens, which are not the next step's."""
    engine, passed = make(kv="full"), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    decode = engine.runner.decode

    def slow(sequences: Any, tokens: Any, sources: Any, record: Any, prompts: Any, *drafts: Any) -> torch.Tensor:
        passed[0] += 5 + 2 * len(prompts)
        return decode(sequences, tokens, sources, record, prompts, *drafts)

    monkeypatch.setattr(engine.runner, "decode", slow)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.add_request("a", [5] * 20, params)
    while not engine.scheduler.running:
        engine.step()
    engine.step()
    engine.pace.forget()
    monkeypatch.setattr(engine.prefill_queue, "joining", lambda _: next(iter(engine.prefill_queue.in_flight), None))
    engine.add_request("b", [6] * 50, params)
    engine.step()
    assert engine.pace.seconds(50) == pytest.approx(2) and engine.decode_steps.seconds == 5
    engine.step()
    assert engine.decode_steps.seconds == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="with graphs of its own")
def test_a_batch_that_a_prompt_joins_has_its_graph_by_then(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made of nobody's rows, beside pieces of the prefill."""

    class Watch:
        """Every piece takes 10 ms."""

        piece = 0.01

        def __init__(self, device: torch.device) -> None:
            self.start()

        def start(self) -> None:
            self.seconds = 0.0

        def launched(self) -> float:
            self.seconds += self.piece
            return self.seconds

    monkeypatch.setattr("shadowkv.engine.scheduling.prefill_queue.Stopwatch", Watch)
    engine = with_graphs(make(kv="full"), monkeypatch, Graph)
    monkeypatch.setitem(BLOCK_TOKENS, engine.device.type, 64)
    graphs, steps, prepared = engine.runner.graphs, [], []
    run, prepare = graphs.run, graphs.prepare

    def noted(plan: DecodePlan, tokens: list[int], sources: list[int], *prompts: Any) -> torch.Tensor:
        key, before = graphs.cache.rounded(plan, graphs.max_batch).shape, graphs.captures
        logits = run(plan, tokens, sources, *prompts)
        steps.append((key, graphs.captures > before))
        return logits

    def noting(plan: DecodePlan, *how: Any) -> None:
        prepared.append(graphs.cache.rounded(plan, graphs.max_batch).shape)
        prepare(plan, *how)

    monkeypatch.setattr(graphs, "run", noted)
    monkeypatch.setattr(graphs, "prepare", noting)
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    engine.add_request("a", [5] * 20, params)
    engine.step()
    engine.add_request("b", [6] * 900, params)
    monkeypatch.setattr(engine.prefill_queue, "advance", lambda _: PrefillQueue.advance(engine.prefill_queue, 0.08))
    while engine.has_work:
        engine.step()
    joined, slow = next((key, slow) for key, slow in steps if key[0] == 2)
    assert joined in prepared and not slow


def test_a_dry_run_has_a_layer_of_each_kind(make: Any) -> None:
    layers = make(kv="full").runner.layers
    others = [copy.deepcopy(layers[-1]) for _ in range(3)]
    others[1].to(torch.float64)
    assert kinds([*layers[:1], *others], [0, 0, 0, 0]) == [layers[0], others[0], others[1]]
    assert kinds([*layers[:1], *others, others[0]], [1, 0, 0, 0, 1]) == [layers[0], others[0], others[1], others[0]]
