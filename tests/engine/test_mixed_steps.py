"""Short prompts are computed by decode steps: nobody waits for more than one pass, nothing leaks, no answer changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine import GREEDY, assert_empty, drain, prompt, tokens
from test_faults import Graph, with_graphs
from test_run_ahead import KINDS, PLAIN, answers

from shadowkv import SamplingParams
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.forward import BLOCK_TOKENS
from shadowkv.engine.scheduling.prefill_queue import LONG_SHARE

LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)


def paced(engine: Engine, seconds: float = 1e-9) -> list[tuple[int, list[int]]]:
    """Makes a token of a prompt seem to take ``seconds``, and a step none. Returns the steps from now on, as they are
    launched: sequences that decode, and new tokens of each prompt."""
    engine.pace.seconds = lambda count: count * seconds
    engine.pace.tokens = lambda limit: int(limit / seconds + 0.5)
    engine._prefill_seconds = lambda gap: gap
    steps, decode = [], engine.runner.decode

    def noted(sequences: Any, last: Any, sources: Any, record: Any, prompts: Any, *drafts: Any) -> torch.Tensor:
        steps.append((len(sequences), [len(ids) for _, ids in prompts]))
        return decode(sequences, last, sources, record, prompts, *drafts)

    engine.runner.decode = noted
    return steps


def never_joining(engine: Engine) -> Engine:
    engine.prefill_queue.joining = lambda seconds: None
    return engine


def alone(engine: Engine, ids: list[int], params: SamplingParams) -> list[int]:
    engine.add_request("x", ids, params)
    return tokens(drain(engine)["x"])


def running(engine: Engine, params: SamplingParams = LONG) -> None:
    """A request that decodes."""
    engine.add_request("a", prompt(1, 70), params)
    while not engine.scheduler.running:
        engine.step()


@pytest.fixture(params=["one by one", "ahead"])
def build(make: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Engines that wait for every step, or launch the next one before."""

    def built(**options: Any) -> Engine:
        engine = make(**options)
        return engine if request.param == "one by one" else with_graphs(engine, monkeypatch, Graph)

    return built


@pytest.mark.parametrize("kv", ["full", "shadowkv", "turbo:values=dense"])
def test_a_short_prompt_costs_those_who_decode_one_pass(build: Any, make: Any, kv: str) -> None:
    engine = build(kv=kv)
    running(engine)
    steps = paced(engine)
    advance = engine.prefill_queue.advance
    engine.prefill_queue.advance = lambda seconds: pytest.fail("a prefill by itself") or advance(seconds)
    outputs: dict[str, list[Any]] = {}
    for number, length in enumerate((90, 500, 1)):
        engine.add_request(str(number), prompt(2 + number, length), GREEDY)
        for _ in range(3):
            new = engine.step()
            assert any(output.request_id == "a" for output in new), "it got no token in a step"
            for output in new:
                outputs.setdefault(output.request_id, []).append(output)
    for name, more in drain(engine).items():
        outputs.setdefault(name, []).extend(more)
    assert [step for step in steps if step[1]] == [(1, [90]), (2, [500]), (3, [1])]
    for number, length in enumerate((90, 500, 1)):
        assert tokens(outputs[str(number)]) == alone(make(kv=kv), prompt(2 + number, length), GREEDY)
    assert_empty(engine)


@pytest.mark.parametrize("kv", ["full", "shadowkv", "quest"])
def test_answers_are_those_of_prompts_computed_by_themselves(build: Any, make: Any, kv: str) -> None:
    kinds = [
        *KINDS,
        replace(PLAIN, max_tokens=12, ignore_eos=False, json_schema='{"type": "array", "items": {"type": "integer"}}'),
        replace(PLAIN, max_tokens=0, prompt_logprobs=1),
    ]
    params = [kinds[number % len(kinds)] for number in range(18)]
    engine, other = build(kv=kv), never_joining(make(kv=kv))
    steps = paced(engine)
    assert answers(engine, params) == answers(other, params)
    assert sum(bool(prompts) for _, prompts in steps) > 5
    assert_empty(engine)


def test_a_step_has_no_more_tokens_than_allowed(build: Any) -> None:
    engine = build(kv="full", max_num_batched_tokens=64, max_num_seqs=8)
    running(engine)
    steps = paced(engine)
    for number, length in enumerate((40, 30, 23, 70, 10)):
        engine.add_request(str(number), prompt(number, length), LONG)
    outputs = drain(engine)
    assert [len(tokens(outputs[str(number)])) for number in range(5)] == [60] * 5
    assert all(count + sum(prompts) <= 64 for count, prompts in steps)
    assert [prompts for _, prompts in steps if prompts] == [[40], [30, 23], [10]], "70 are computed by themselves"
    assert_empty(engine)


def test_prompts_are_packed_as_far_as_others_can_wait(build: Any) -> None:
    engine = build(kv="full", max_num_seqs=40)
    running(engine, replace(LONG, max_tokens=400))
    steps = paced(engine, 1e-3)  # 80 tokens in a gap, 30 where there are several prompts, 250 of a burst
    for number, length in enumerate((12, 12, 12, 81, 80)):
        engine.add_request(str(number), prompt(number, length), GREEDY)
    for _ in range(30):
        engine.step()
    assert [prompts for _, prompts in steps if prompts] == [[12, 12], [12], [80]]
    for number in range(30):
        engine.add_request(f"burst {number}", prompt(100 + number, 20), GREEDY)
    drain(engine)
    packs = [len(prompts) for _, prompts in steps if prompts][3:]
    assert packs == [12, 12, *[1] * 6], "what is left then takes less than a quarter of a second"
    assert_empty(engine)


def test_before_anything_was_measured_prompts_are_computed_by_themselves(make: Any) -> None:
    engine = make(kv="full")
    running(engine)
    engine.pace.forget()
    engine.add_request("b", prompt(2, 50), GREEDY)
    engine._start_prefill()
    assert engine.prefill_queue.in_flight and engine._start_prefill() is None
    drain(engine)
    assert 0 < engine.pace.seconds(1) < 10
    assert_empty(engine)


@pytest.mark.parametrize("kv", ["turbo:values=dense", "fp8"])
def test_later_turns_of_compressed_sequences_join_a_step_in_a_graph(
    make: Any, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    monkeypatch.setitem(BLOCK_TOKENS, "cuda" if torch.cuda.is_available() else "cpu", 500)
    found = []
    for graphs in (False, True):
        engine = make(kv=kv, kv_dense_below=0, max_num_seqs=8)
        engine = with_graphs(engine, monkeypatch, Graph) if graphs else never_joining(engine)
        engine.add_request("first", prompt(5, 1250), GREEDY)
        turn = prompt(5, 1250) + tokens(drain(engine)["first"]) + prompt(6, 130)
        running(engine, replace(LONG, max_tokens=30))
        steps = paced(engine)
        engine.add_request("turn", turn, LONG)
        found.append({name: tokens(outputs) for name, outputs in drain(engine).items()})
        assert [prompts for _, prompts in steps if prompts] == ([[131]] if graphs else [])
        if graphs:
            assert any(key[:2] == (256, True) for key in engine.runner.graphs.graphs)
        assert_empty(engine)
    assert found[0]["turn"] == found[1]["turn"]


def test_what_takes_more_than_a_pass_is_computed_by_itself(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt; one whose cached start makes it one, unless the pass can be a graph; scored ones; one that another
    tier is still sending."""
    engine = build(kv="full", max_num_seqs=8)
    engine.add_request("turn", prompt(5, 200), GREEDY)
    turn = prompt(5, 200) + tokens(drain(engine)["turn"]) + prompt(6, 30)
    running(engine, replace(LONG, max_tokens=300))
    monkeypatch.setitem(BLOCK_TOKENS, engine.device.type, 100)
    steps = paced(engine)
    engine.add_request("long", prompt(2, 101), GREEDY)
    engine.add_request("later turn", turn, GREEDY)
    for _ in range(30):
        engine.step()
    engine.add_request("scored", prompt(3, 20), replace(GREEDY, prompt_logprobs=0))
    for _ in range(30):
        engine.step()
    captured = [] if engine.runner.graphs is None else [[31]]  # its own tokens, and the answer's last
    assert [prompts for _, prompts in steps if prompts] == captured
    engine.add_request("arriving", prompt(4, 20), GREEDY)
    engine.prefill_queue.start()
    (prefill,) = engine.prefill_queue.in_flight
    assert engine.prefill_queue.joining(1.0) is prefill
    prefill.rows[0].sequence.pending_layers = object()
    assert engine.prefill_queue.joining(1.0) is None
    prefill.rows[0].sequence.pending_layers = None
    assert engine.prefill_queue.joining(1.0) is prefill
    drain(engine)
    assert [prompts for _, prompts in steps if prompts] == [*captured, [20]]
    assert_empty(engine)


def test_a_short_prompt_passes_a_long_one_with_a_step(build: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long one stays paused meanwhile, and then has its share of the time before the next."""
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", 100)
    engine = build(kv="full", max_num_seqs=8)
    running(engine, replace(LONG, max_tokens=300))
    steps = paced(engine, 1e-4)
    monkeypatch.setattr("shadowkv.engine.engine.TOKEN_GAP", 0.02)
    engine.prefill_queue.advance = lambda seconds, advance=engine.prefill_queue.advance: advance(0.0)
    long = prompt(2, 1500)
    engine.add_request("long", long, GREEDY)
    for _ in range(3):
        engine.step()
    (prefill,) = engine.prefill_queue.in_flight
    done = prefill.done
    assert 0 < done < prefill.pieces
    engine.add_request("b", prompt(3, 90), GREEDY)
    engine.step()
    assert steps[-1][1] == [90] and prefill.done == done
    assert prefill.owed == pytest.approx(90e-4 * LONG_SHARE / (1 - LONG_SHARE))
    engine.add_request("c", prompt(4, 90), GREEDY)
    engine.step()
    assert prefill.done == done + 1 and not steps[-1][1], "another passed it at once"
    outputs = drain(engine)
    assert tokens(outputs["long"]) == alone(make(kv="full"), long, GREEDY)
    assert_empty(engine)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no layer")])
@pytest.mark.parametrize("kv", ["full", "shadowkv"])
def test_an_error_in_the_pass_ends_its_prompts_alone(
    build: Any, make: Any, kv: str, error: Exception, after: int
) -> None:
    engine = build(kv=kv if kv == "full" else f"{kv}:budget=128")
    params = replace(LONG, max_tokens=150)  # pages are compressed before and behind it
    engine.add_request("a", prompt(1, 500), params)
    outputs = []
    for _ in range(60):
        outputs += engine.step()
    paced(engine)
    append = engine.cache.append

    def failing(layer: int, k: torch.Tensor, v: torch.Tensor, batch: Any) -> None:
        if len(batch.groups[0]) > 1 and layer == after:
            raise error
        append(layer, k, v, batch)

    engine.cache.append = failing
    for name in ("b", "c"):
        engine.add_request(name, prompt(2, 50), GREEDY)
    new = engine.step()
    engine.cache.append = append
    failed = {output.request_id: output.error for output in new if output.finish_reason == "error"}
    assert failed.keys() == {"b", "c"} and all(type(error).__name__ in message for message in failed.values())
    outputs += [output for output in new if output.request_id == "a"] + drain(engine)["a"]
    other = make(kv=kv if kv == "full" else f"{kv}:budget=128")
    assert tokens(outputs) == alone(other, prompt(1, 500), params)
    assert_empty(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.AcceleratorError("illegal memory access")])
def test_what_ends_everything_is_raised(build: Any, error: BaseException) -> None:
    engine = build(kv="full")
    running(engine)
    paced(engine)

    append = engine.cache.append

    def failing(layer: int, k: torch.Tensor, v: torch.Tensor, batch: Any) -> None:
        if len(batch.groups[0]) > 1:
            raise error
        append(layer, k, v, batch)

    engine.cache.append = failing
    for name in ("b", "c"):
        engine.add_request(name, prompt(2, 50), GREEDY)
    with pytest.raises(type(error)):
        engine.step()
    engine.cache.append = append
    engine.abort("b")
    engine.abort("c")
    assert tokens(drain(engine)["a"])
    assert_empty(engine)


@pytest.mark.parametrize("victims", [["b"], ["a"], ["a", "b"], ["a", "b", "c"]])
def test_aborts_while_a_pass_is_in_flight_leave_nothing_behind(
    make: Any, monkeypatch: pytest.MonkeyPatch, victims: list[str]
) -> None:
    engine = with_graphs(make(kv="shadowkv"), monkeypatch, Graph)
    running(engine)
    engine.step()
    steps = paced(engine)
    for name, seed in (("b", 2), ("c", 3)):
        engine.add_request(name, prompt(seed, 50), GREEDY)
    outputs = engine.step()
    assert steps[-1] == (1, [50, 50]) and {output.request_id for output in outputs} == {"a"}, "it is in flight"
    for name in victims:
        engine.abort(name)
    rest = drain(engine)
    assert rest.keys() == {"a", "b", "c"} - set(victims)
    if "b" in rest:
        assert tokens(rest["b"]) == alone(make(kv="shadowkv"), prompt(2, 50), GREEDY)
    assert_empty(engine)


def test_logits_that_are_not_finite_fail_their_prompt_alone(build: Any) -> None:
    engine = build(kv="full")
    running(engine)
    paced(engine)
    embed = engine.runner.model.embed
    engine.runner.model.embed = lambda ids: embed(ids).masked_fill((ids == 299)[:, None], float("inf"))
    engine.add_request("bad", [5, 299, 7], GREEDY)
    engine.add_request("good", prompt(3, 20), GREEDY)
    outputs = drain(engine)
    assert "not finite" in outputs["bad"][-1].error
    assert len(tokens(outputs["good"])) == 8
    assert_empty(engine)


def test_a_prompt_that_nobody_is_left_to_decode_with_is_computed_by_itself(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_graphs(make(kv="full"), monkeypatch, Graph)
    running(engine, replace(GREEDY, max_tokens=3))
    steps = paced(engine)
    engine.add_request("b", prompt(2, 50), GREEDY)  # the token in flight is the other's last
    engine.step()
    assert engine.prefill_queue.in_flight and not engine.scheduler.running
    assert len(tokens(drain(engine)["b"])) == 8
    assert not [prompts for _, prompts in steps if prompts]
    assert_empty(engine)


def test_selections_are_told_of_steps_with_prompts(build: Any, make: Any) -> None:
    told = replace(LONG, return_selections=True, max_tokens=12)

    def selected(engine: Engine, joining: bool) -> list[Any]:
        engine.add_request("a", prompt(1, 500), told)
        found = []
        for number in range(20):
            if joining and number == 3:
                paced(engine)
                engine.add_request("b", prompt(2, 40), replace(told, max_tokens=2))
            found += [output for output in engine.step() if output.request_id == "a"]
        drain(engine)
        return [output.selections for output in found]

    engine = build(kv="quest:budget=64")
    found = selected(engine, True)
    assert found == selected(make(kv="quest:budget=64"), False)
    assert found[0] == [None] and all(one is not None for (one,) in found[1:])
    assert_empty(engine)
