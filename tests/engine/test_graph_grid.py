"""Which steps are captured in graphs, and when: those of short sequences at start, others once they were met often."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from drafting import draft_by
from test_engine import assert_empty, drain, prompt, tokens
from test_faults import Graph, with_graphs

from shadowkv import SamplingParams
from shadowkv.engine import warmup
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution import cuda_graphs
from shadowkv.engine.speculation.gate import Account
from shadowkv.engine.warmup import GRID_SECONDS, GraphGrid
from shadowkv.kvcache.decode import planning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with graphs of its own")
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
ROOM = 10 * 2**30


@pytest.fixture
def graphed(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines with graphs that a test can count, and a GPU's free memory."""

    def built(**options: Any) -> Engine:
        engine = with_graphs(make(**options), monkeypatch, Graph)
        monkeypatch.setattr(cuda_graphs, "EAGER_STEPS", 8)
        monkeypatch.setattr(warmup, "unreserved_bytes", lambda device: ROOM)
        return engine

    return built


def capture_grid(engine: Engine, stopped: Callable[[], bool] = lambda: False) -> bool:
    return GraphGrid(engine).capture(GRID_SECONDS, stopped)


def answer(engine: Engine, lengths: list[int]) -> dict[str, list[int]]:
    """Answers of requests that come one after the other."""
    found: dict[str, list[int]] = {}
    for number, length in enumerate(lengths):
        engine.add_request(str(number), prompt(number, length), LONG)
        for output in [*engine.step(), *engine.step()]:
            found.setdefault(output.request_id, []).extend(output.token_ids)
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(tokens(outputs))
    return found


def keys(engine: Engine) -> list[tuple[int, ...]]:
    return list(engine.runner.graphs.graphs)


@pytest.mark.parametrize("kv", ["full", "turbo:values=dense,dense_below=4000"])
def test_steps_of_short_sequences_have_graphs_from_the_start(graphed: Any, make: Any, kv: str) -> None:
    engine = graphed(kv=kv, max_num_seqs=6, kv_dense_below="auto")
    capture_grid(engine)
    assert engine.cache.free == engine.cache.total
    assert [key[0] for key in keys(engine)[:7]] == [2048, 6, 5, 4, 3, 2, 1], "the largest first: others use its memory"
    captures = engine.runner.graphs.captures
    lengths = [5, 300, 900, 70, 64, 1500]
    assert answer(engine, lengths) == answer(make(kv=kv, max_num_seqs=6, kv_dense_below="auto"), lengths)
    assert engine.runner.graphs.captures == captures and not engine.runner.graphs.eager
    assert_empty(engine)


@pytest.mark.parametrize(
    ("kv", "count"), [("full", 0), ("turbo:values=dense", 1), ("turbo:values=dense,outliers=8", 0)]
)
def test_one_graph_of_later_turns_of_compressed_sequences_is_captured(graphed: Any, kv: str, count: int) -> None:
    """It compiles what all of them need. Outliers are not rebuilt in a graph."""
    engine = graphed(kv=kv, max_num_seqs=6)
    capture_grid(engine)
    mixed = [key for key in keys(engine) if key[0] in cuda_graphs.PROMPT_ROWS]
    assert sum(key[1] > 0 for key in mixed) == count < len(mixed)


@pytest.mark.parametrize(("most", "drafted"), [(9, 0), (2, 7), (5, 1)])
def test_steps_of_all_numbers_of_rows_have_graphs_from_the_start(graphed: Any, most: int, drafted: int) -> None:
    """Also of full batches whose number is rounded up, and of those with drafts."""
    speculation = {"method": "suffix", "num_speculative_tokens": drafted} if drafted else None
    engine = graphed(kv="full", max_num_seqs=most, max_cached_seqs=12, speculative_config=speculation)
    capture_grid(engine)
    sequences = [engine.cache.allocate(1, 100) for _ in range(most)]
    for rows in range(1, most + drafted + 1):
        counts = [1] * min(rows, most)
        counts[0] += rows - len(counts)
        assert engine.runner.graphs.has(engine.cache.plan_decode(sequences[: len(counts)], counts))


def test_drafts_from_the_text_of_one_long_sequence_have_graphs_from_the_start(
    graphed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any length. The pages of a long sequence are read once for all of its rows, in graphs of their own."""
    monkeypatch.setattr(planning, "MIN_EXACT_PAGES", 4)
    monkeypatch.setattr(warmup, "MIN_EXACT_PAGES", 4)
    draft_by(monkeypatch, lambda request: [5] * (len(request.output_token_ids) % 12))
    speculation = {"method": "suffix", "num_speculative_tokens": 11}
    engine, seen = graphed(kv="full", max_num_seqs=3, max_model_len=700, speculative_config=speculation), set[int]()
    capture_grid(engine)
    plan_decode = engine.cache.plan_decode

    def spy(sequences: Any, counts: Any, *others: Any) -> Any:
        plan = plan_decode(sequences, counts, *others)
        if counts is not None:
            assert plan.groups[0].starts is not None and engine.runner.graphs.has(plan), counts
            seen.update(counts)
        return plan

    monkeypatch.setattr(engine.cache, "plan_decode", spy)
    for length in (400, 550):
        answer(engine, [length])
    assert seen == set(range(1, 13)) - {1}
    assert_empty(engine)


@pytest.mark.parametrize("kv", ["full-speculative:budget=32", "fp8:index=sketch,chunk=1,drafts=true,budget=32"])
def test_draft_steps_and_the_steps_that_verify_them_have_graphs_from_the_start(
    graphed: Any, make: Any, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    """Of all numbers of sequences. Only drafts that end early have shapes of their own."""
    monkeypatch.setattr(warmup, "MIN_EXACT_PAGES", 8)
    monkeypatch.setattr(Account, "length", lambda self, drafts, *others: max(most for _, most in drafts))
    options = {"kv": kv, "max_num_seqs": 3, "speculative_config": {"method": "sparse", "num_speculative_tokens": 4}}
    engine, seen = graphed(**options), list[tuple[int, int | None, bool, bool]]()
    capture_grid(engine)
    plan_decode = engine.cache.plan_decode

    def spy(sequences: Any, counts: Any, drafting: bool, *others: Any) -> Any:
        plan = plan_decode(sequences, counts, drafting, *others)
        rows = 1 if counts is None else counts[0] if len(set(counts)) == 1 else None
        seen.append((len(sequences), rows, drafting, engine.runner.graphs.has(plan)))
        return plan

    monkeypatch.setattr(engine.cache, "plan_decode", spy)
    lengths = [500, 400, 300]
    assert answer(engine, lengths) == answer(make(**options), lengths)
    for count in (1, 2, 3):
        for rows, drafting in ((1, True), (5, False)):
            found = [has for *kind, has in seen if kind == [count, rows, drafting]]
            assert found and all(found), f"{count} sequences of {rows} rows"


def test_a_shape_that_was_not_foreseen_runs_eagerly_before_it_is_captured(graphed: Any, make: Any) -> None:
    engine, options = graphed(kv="full", max_num_seqs=2), {"kv": "full", "max_num_seqs": 2}
    graphs, seen = engine.runner.graphs, []
    run = graphs._run

    def noted(key: tuple[int, ...], *rest: Any) -> Any:
        before = graphs.captures
        result = run(key, *rest)
        seen.append((key, "captured" if graphs.captures > before else "graph" if key in graphs.graphs else "eager"))
        return result

    graphs._run = noted
    lengths = [5, 90]
    assert answer(engine, lengths) == answer(make(**options), lengths)
    for key in {key for key, _ in seen}:
        how = [how for of_key, how in seen if of_key == key]
        assert how[:10] == [*["eager"] * 8, "captured", "graph"][: len(how)] and set(how[9:]) <= {"graph"}
    assert {key[0] for key, _ in seen} == {1, 2} and not graphs.eager.keys() & graphs.graphs.keys()


@pytest.mark.parametrize("limit", ["seconds", "bytes", "graphs", "stopped"])
def test_the_grid_ends_at_its_limits(
    graphed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: str
) -> None:
    engine = graphed(kv="full", max_num_seqs=6)
    graphs = engine.runner.graphs
    if limit == "seconds":
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 4000 * len(graphs.graphs))
    elif limit == "bytes":
        monkeypatch.setattr(
            warmup, "unreserved_bytes", lambda device: ROOM - warmup.GRID_BYTES * len(graphs.graphs) // 2
        )
    elif limit == "graphs":
        monkeypatch.setattr(warmup, "MAX_GRAPHS", 2)
    with caplog.at_level(logging.INFO, "shadowkv.engine"):
        capture_grid(engine, lambda: limit == "stopped")
    assert len(graphs.graphs) == {"seconds": 1, "bytes": 3, "graphs": 1, "stopped": 0}[limit]
    assert engine.cache.free == engine.cache.total
    (message,) = caplog.messages
    assert message.startswith(
        f"graphs: {len(graphs.graphs)}, for 6 batch sizes up to 6 and sequences of up to 0 tokens"
    )


def test_a_grid_without_memory_leaves_steps_that_run_eagerly(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Graph):
        def __init__(self, *args: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine = with_graphs(make(kv="full"), monkeypatch, Failing)
    monkeypatch.setattr(warmup, "unreserved_bytes", lambda device: ROOM)
    capture_grid(engine)
    assert engine.runner.graphs.without and not engine.runner.graphs.graphs
    assert answer(engine, [5, 90]) == answer(make(kv="full"), [5, 90])
    assert_empty(engine)


def test_sequences_that_there_is_no_room_for_end_the_grid(graphed: Any) -> None:
    engine = graphed(kv="full")
    held = engine.cache.allocate(2000, 2000)
    others = [engine.cache.allocate(1, 2048) for _ in range(engine.cache.free["sequences"])]
    capture_grid(engine)
    assert not keys(engine)
    for sequence in (held, *others):
        engine.cache.release(sequence)
    capture_grid(engine)
    assert keys(engine)


def test_logits_of_all_graphs_are_in_one_place(graphed: Any) -> None:
    """They would take as much memory again for each."""
    engine = graphed(kv="full")
    capture_grid(engine)
    results = [captured.result for captured in engine.runner.graphs.graphs.values()]
    assert len(results) > 2 and len({result.data_ptr() for result in results}) == 1


def test_what_a_start_has_no_time_for_is_captured_one_by_one(graphed: Any, make: Any) -> None:
    """Whatever is computed between two captures."""
    engine, whole = graphed(kv="full", max_num_seqs=3), graphed(kv="full", max_num_seqs=3)
    capture_grid(whole)
    grid, counts = GraphGrid(engine), []
    assert grid.capture(1e-9)
    counts.append(len(keys(engine)))
    assert answer(engine, [5, 90]) == answer(make(kv="full", max_num_seqs=3), [5, 90])
    while grid.capture():
        counts.append(len(keys(engine)))
        assert engine.cache.free["device"] <= engine.cache.total["device"]
    assert set(keys(whole)) <= set(keys(engine)) and counts[0] == 1
    assert all(later - earlier == 1 for earlier, later in pairwise(counts[1:]))
