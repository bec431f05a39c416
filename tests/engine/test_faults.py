"""What goes wrong in one request, or in one prefill, ends there: the others go on and every page comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_engine import GREEDY, assert_empty, drain, prompt, small_blocks, tokens

from shadowkv import SamplingParams
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution import cuda_graphs
from shadowkv.engine.request import RequestError


def fail_next_prefill(engine: Engine, after: int, error: BaseException) -> None:
    """The next prefill raises after as many pauses; later ones are as they should be."""
    prefill = engine.runner.prefill

    def broken(*args: Any) -> Iterator[None]:
        engine.runner.prefill = prefill
        started = prefill(*args)
        for _ in range(after):
            yield next(started)
        raise error

    engine.runner.prefill = broken


@pytest.mark.parametrize("aborted", [False, True])
def test_a_prefill_that_fails_ends_its_requests_alone(make: Any, aborted: bool) -> None:
    engine = make(kv="shadowkv")
    engine.add_request("before", prompt(0, 10), SamplingParams(max_tokens=40, ignore_eos=True))
    while not engine.scheduler.running:
        engine.step()
    engine.add_request("a", prompt(1, 100), GREEDY)
    engine.add_request("b", prompt(2, 900), GREEDY)
    fail_next_prefill(engine, aborted, MemoryError("no room for /secret/path"))
    engine.prefill_queue.start()
    if aborted:
        engine.abort("b")
    outputs = drain(engine)
    assert outputs["before"][-1].finish_reason == "length"
    assert outputs.keys() == {"before", "a"} | ({"b"} if not aborted else set())
    for name in {"a", "b"} & outputs.keys():
        (output,) = outputs[name]
        assert output.finish_reason == "error"
        assert "MemoryError" in output.error and "secret" not in output.error
    engine.add_request("a", prompt(1, 100), GREEDY)
    assert len(tokens(drain(engine)["a"])) == 8
    assert_empty(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.AcceleratorError("illegal memory access")])
def test_what_ends_everything_is_raised_and_still_leaves_nothing_behind(make: Any, error: BaseException) -> None:
    engine = make(kv="full")
    engine.add_request("a", prompt(1, 100), GREEDY)
    fail_next_prefill(engine, 1, error)
    with pytest.raises(type(error)):
        drain(engine)
    engine.abort("a")
    assert not engine.has_work
    assert_empty(engine)


def test_a_schema_with_a_dead_end_fails_its_request_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kv="full")
    engine.add_request("free", prompt(1, 20), GREEDY)
    engine.add_request("bound", prompt(2, 20), SamplingParams(max_tokens=30, json_schema='{"enum": ["abc"]}'))
    constraint = next(r.constraint for r in engine.scheduler.waiting if r.constraint)
    mask, count = constraint.mask, 0

    def closing(logits: torch.Tensor) -> None:
        nonlocal count
        count += 1
        mask(logits) if count < 3 else logits.fill_(float("-inf"))

    monkeypatch.setattr(constraint, "mask", closing)
    outputs = drain(engine)
    assert outputs["bound"][-1].finish_reason == "error" and "JSON schema" in outputs["bound"][-1].error
    assert engine.tokenizer.decode(tokens(outputs["bound"])) == '"a'
    assert len(tokens(outputs["free"])) == 8
    assert_empty(engine)


def test_an_abort_among_prompts_prefilled_together_is_not_scored(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kv="full")
    scored = []
    score = engine.runner.prompt_logprobs
    monkeypatch.setattr(
        engine.runner, "prompt_logprobs", lambda hidden, ids, count: scored.append(ids) or score(hidden, ids, count)
    )
    for name, seed in (("a", 1), ("b", 2)):
        engine.add_request(name, prompt(seed, 40), SamplingParams(max_tokens=2, prompt_logprobs=0, logprobs=0))
    engine.prefill_queue.start()
    next(engine.prefill_queue.in_flight[0].steps)
    engine.abort("a")
    outputs = drain(engine)
    assert scored == [prompt(2, 40)] and set(outputs) == {"b"}
    alone = make(kv="full")
    alone.add_request("b", prompt(2, 40), SamplingParams(max_tokens=2, prompt_logprobs=0, logprobs=0))
    assert drain(alone)["b"][0].prompt_logprobs == pytest.approx(outputs["b"][0].prompt_logprobs)
    assert_empty(engine)


def test_a_long_prefill_on_an_idle_engine_can_be_aborted(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowkv.engine.engine.IDLE_PREFILL_SECONDS", 0.0)
    engine = make(kv="shadowkv")
    small_blocks(monkeypatch, 100)
    engine.add_request("a", prompt(1, 1500), GREEDY)
    assert not engine.step() and engine.has_work
    engine.abort("a")
    assert not engine.has_work
    assert_empty(engine)


def test_a_request_that_was_added_cannot_be_added_again(make: Any) -> None:
    engine = make(kv="full")
    request = engine.request("a", prompt(1, 20), GREEDY)
    engine.add(request)
    with pytest.raises(RequestError, match="in use"):
        engine.add(request)
    assert len(tokens(drain(engine)["a"])) == 8
    assert_empty(engine)


EXTREMES = [
    {"top_k": 2**31 - 1, "temperature": 100.0},
    {"top_k": 10**6, "top_p": 1e-300, "seed": -(2**63)},
    {"min_p": 1.0, "seed": 2**63 - 1},
    {"repetition_penalty": 1e-300},
    {"temperature": 1e-300, "presence_penalty": 2.0, "frequency_penalty": -2.0},
    {"logit_bias": dict.fromkeys(range(300), -100.0), "min_tokens": 10**400},
    {"stop": ("x" * 10**5,) * 100, "logprobs": 20},
]


def test_extreme_parameters_do_not_end_the_engine(make: Any) -> None:
    engine = make(kv="full", max_num_seqs=8)
    for number, extreme in enumerate(EXTREMES):
        engine.add_request(str(number), prompt(number, 20), SamplingParams(**{"max_tokens": None, **extreme}))
    for number in range(8):
        outputs = [output for _ in range(4) for output in engine.step()]
        assert outputs or number
    for number in range(len(EXTREMES)):
        engine.abort(str(number))
    drain(engine)
    assert_empty(engine)
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(top_k=10**400)


class Graph:
    """What ``cuda_graphs._Captured`` is, on a machine without CUDA: it computes anew."""

    def __init__(self, numbers: np.ndarray, function: Any, dry_run: Any, pool: Any, device: torch.device) -> None:
        self.function = function
        dry_run(torch.from_numpy(numbers))
        self.replay(numbers)

    def replay(self, numbers: np.ndarray) -> None:
        self.result = self.function(torch.from_numpy(numbers))


def with_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch, graph: type[Graph]) -> Engine:
    if engine.device.type == "cuda":
        pytest.skip("this machine has graphs: the stand-in computes on a CPU")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "_Captured", graph)
    monkeypatch.setattr(cuda_graphs, "EAGER_STEPS", 0)
    most, vocabulary = engine.config.max_rows, engine.model_config.vocab_size
    engine.runner.graphs = cuda_graphs.CudaGraphs(engine.cache, engine.runner.step, most, vocabulary)
    engine.decode_steps.run_ahead = True
    return engine


LENGTHS = {"a": 500, "b": 90, "c": 5}


def answers(engine: Engine) -> dict[str, list[int]]:
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)  # enough to compress
    for seed, (name, length) in enumerate(LENGTHS.items()):
        engine.add_request(name, prompt(seed, length), params)
    return {name: tokens(outputs) for name, outputs in drain(engine).items()}


def test_shapes_whose_graph_does_not_fit_run_without_one(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Graph):
        """Every second capture fails, after it has computed once, and no shape is tried twice."""

        tried: ClassVar[list[Any]] = []

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.tried.append(args[0].shape)
            if len(self.tried) % 2:
                raise torch.OutOfMemoryError("CUDA out of memory")

    wanted = answers(make(kv="shadowkv:budget=128"))
    engine = with_graphs(make(kv="shadowkv:budget=128"), monkeypatch, Failing)
    assert answers(engine) == wanted
    assert engine.runner.graphs.without and engine.runner.graphs.graphs
    assert len(Failing.tried) == len(engine.runner.graphs.without) + len(engine.runner.graphs.graphs)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "CUDA graph" in caplog.text
    assert_empty(engine)


@pytest.mark.parametrize("shortages", [1, 2])
def test_a_step_without_memory_ends_its_requests_and_not_the_engine(
    make: Any, monkeypatch: pytest.MonkeyPatch, shortages: int
) -> None:
    """One is met by launching the step again when it is due, instead of ahead."""
    engine = with_graphs(make(kv="shadowkv:budget=128"), monkeypatch, Graph)
    wanted = answers(make(kv="shadowkv:budget=128"))
    run, count = engine.runner.graphs.run, 0

    def failing(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if 70 <= count < 70 + shortages:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*args)

    engine.runner.graphs.run = failing
    for seed, (name, length) in enumerate(LENGTHS.items()):
        engine.add_request(name, prompt(seed, length), SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True))
    outputs = drain(engine)
    for name in LENGTHS:
        if shortages == 1:
            assert tokens(outputs[name]) == wanted[name]
        else:
            assert outputs[name][-1].finish_reason == "error" and "OutOfMemoryError" in outputs[name][-1].error
            assert wanted[name][: len(tokens(outputs[name]))] == tokens(outputs[name]) != wanted[name]
    assert_empty(engine)
    assert answers(engine) == wanted
