"""Short prompts are computed while a long one is paused: it gets its share, nothing leaks, and no answer changes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from test_engine import GREEDY, assert_empty, drain, leave_blocks, prompt, small_blocks, tokens
from test_faults import fail_next_prefill

from shadowkv import LLM, SamplingParams
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.scheduling.prefill_queue import LONG_SHARE

LONG, SHORT = prompt(1, 1500), prompt(2, 90)
PROMPTS = {"long": LONG, "next": prompt(3, 300), "short": SHORT}


@pytest.fixture(autouse=True)
def often_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 100)
    monkeypatch.setattr("shadowkv.engine.engine.IDLE_PREFILL_SECONDS", 0.0)


class Pieces:
    """A stopwatch by which every piece of a prefill takes a second."""

    piece = 1.0

    def __init__(self, device: Any) -> None:
        self.start()

    def start(self) -> None:
        self.seconds = 0.0

    def launched(self) -> float:
        self.seconds += 1.0
        return self.seconds


def both_at_work(engine: Engine) -> None:
    """A long prefill that is paused, and a short one that has begun."""
    engine.add_request("long", LONG, GREEDY)
    for _ in range(3):
        assert not engine.step()
    engine.add_request("short", SHORT, GREEDY)
    assert not engine.step()
    assert names(engine) == [["long"], ["short"]]


def names(engine: Engine) -> list[list[str]]:
    return [[row.request.request_id for row in one.rows] for one in engine.prefill_queue.in_flight]


def alone(make: Any, ids: list[int], **options: Any) -> list[int]:
    engine = make(**options)
    engine.add_request("x", ids, GREEDY)
    return tokens(drain(engine)["x"])


def in_order(engine: Engine) -> list[TokenOutput]:
    found = []
    while engine.has_work:
        found += engine.step()
    return found


@pytest.mark.parametrize("kv", ["full", "shadowkv", "turbo:values=dense", "turbo:dense_below=400,values=dense"])
def test_a_short_request_overtakes_a_long_prefill(make: Any, kv: str) -> None:
    engine = make(kv=kv)
    both_at_work(engine)
    outputs = in_order(engine)
    ends = [output.request_id for output in outputs if output.finish_reason]
    assert ends == ["short", "long"]
    first = next(i for i, output in enumerate(outputs) if output.request_id == "long")
    assert sum(output.request_id == "short" for output in outputs[:first]) == 8, "the long one was not paused"
    for name, ids in (("short", SHORT), ("long", LONG)):
        assert tokens([one for one in outputs if one.request_id == name]) == alone(make, ids, kv=kv)
    assert_empty(engine)


def test_a_next_turn_of_few_new_tokens_overtakes_too(make: Any) -> None:
    engine = make(kv="full")
    engine.add_request("turn 1", prompt(5, 700), GREEDY)
    turn = prompt(5, 700) + tokens(drain(engine)["turn 1"]) + SHORT
    engine.add_request("long", LONG, GREEDY)
    engine.step()
    engine.add_request("turn 2", turn, GREEDY)
    outputs = in_order(engine)
    assert [output.request_id for output in outputs if output.finish_reason] == ["turn 2", "long"]
    assert next(output for output in outputs if output.request_id == "turn 2").cached_tokens == 707
    assert tokens([one for one in outputs if one.request_id == "turn 2"]) == alone(make, turn, kv="full")
    assert_empty(engine)


def test_the_long_prefill_gets_its_share_of_the_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowkv.engine.scheduling.prefill_queue.Stopwatch", Pieces)
    engine, pieces, number = make(kv="full", max_num_seqs=8), {"long": 0, "short": 0}, 0
    once = SamplingParams(max_tokens=1)
    engine.add_request("long", LONG, once)
    while True:
        while len(engine.scheduler.waiting) < 3:
            engine.add_request(str(number), prompt(number, 40), once)
            number += 1
        in_flight = engine.prefill_queue.in_flight
        outputs = engine.step()
        if any(output.request_id == "long" for output in outputs):
            break
        kind = "long" if names(engine)[-1:] == [["long"]] and not outputs else "short"
        pieces[kind] += 1
        assert len(in_flight) <= 2
    assert pieces["long"] >= 15  # a layer of blocks, and the newest tokens of another
    others = (1 - LONG_SHARE) / LONG_SHARE
    assert 0.5 * others * pieces["long"] < pieces["short"] <= others * (pieces["long"] + 1) + 3
    assert number > 10
    for one in range(number):
        engine.abort(str(one))
    drain(engine)
    assert_empty(engine)


def test_short_ones_pass_long_ones_that_wait_and_leave_them_a_place(make: Any) -> None:
    engine = make(kv="full", max_num_seqs=3)
    engine.add_request("long", LONG, GREEDY)
    engine.step()
    engine.add_request("next", prompt(3, 300), GREEDY)
    for number in range(2):
        engine.add_request(str(number), prompt(4 + number, 90), GREEDY)
    engine.step()
    assert names(engine) == [["long"], ["0"]]
    assert [request.request_id for request in engine.scheduler.waiting] == ["next", "1"]
    assert len(drain(engine)) == 4
    assert_empty(engine)


@pytest.mark.parametrize("room", [True, False])
def test_short_ones_leave_long_ones_that_wait_their_memory(make: Any, room: bool) -> None:
    engine = make(kv="full")
    blocks = {name: engine.cache.demand(len(ids), len(ids) + 7)["device"] for name, ids in PROMPTS.items()}
    leave_blocks(engine, sum(blocks.values()) - (not room), 0)
    engine.add_request("long", LONG, GREEDY)
    engine.step()
    engine.add_request("next", PROMPTS["next"], GREEDY)
    engine.add_request("short", SHORT, GREEDY)
    engine.step()
    assert names(engine) == [["long"], ["short"]][: 1 + room]
    ends = [output.request_id for output in in_order(engine) if output.finish_reason]
    assert ends.index("short") < ends.index("long") if room else ends[0] == "long"
    assert_empty(engine)


def test_long_prompts_are_prefilled_alone(make: Any) -> None:
    engine = make(kv="full")
    for name, length in (("a", 10), ("b", 200), ("c", 20), ("d", 30)):
        engine.add_request(name, prompt(length, length), GREEDY)
    prefill, seen = engine.runner.prefill, []
    engine.runner.prefill = lambda work, scored: seen.append([len(ids) for _, ids in work]) or prefill(work, scored)
    assert len(drain(engine)) == 4
    assert seen == [[10], [200], [20], [30]]  # while others decode there is no time for two
    assert_empty(engine)


@pytest.mark.parametrize("victims", [["short"], ["long"], ["short", "long"], ["long", "short"]])
def test_aborts_while_both_are_at_work_leave_nothing_behind(make: Any, victims: list[str]) -> None:
    engine = make(kv="shadowkv")
    both_at_work(engine)
    for name in victims:
        engine.abort(name)
    outputs = drain(engine)
    assert outputs.keys() == {"short", "long"} - set(victims)
    for name in outputs:
        assert tokens(outputs[name]) == alone(make, {"short": SHORT, "long": LONG}[name], kv="shadowkv")
    assert_empty(engine)


def test_an_abort_in_the_long_one_waits_for_it_alone(make: Any) -> None:
    """A short one's end must not forget who was aborted elsewhere."""
    engine = make(kv="full")
    engine.add_request("long", LONG, GREEDY)
    engine.step()
    for name in ("a", "b"):
        engine.add_request(name, prompt(3, 40), GREEDY)
    engine.step()
    assert names(engine) == [["long"], ["a", "b"]]
    engine.abort("a")
    engine.abort("long")
    assert names(engine) == [["a", "b"]] and engine._aborted == {"a"}
    assert drain(engine).keys() == {"b"}
    assert_empty(engine)


@pytest.mark.parametrize("fails", ["short", "long"])
def test_an_error_in_either_ends_its_request_alone(make: Any, fails: str) -> None:
    engine = make(kv="shadowkv")
    error = MemoryError("no room for /secret/path")
    if fails == "long":
        fail_next_prefill(engine, 5, error)
        both_at_work(engine)
    else:
        engine.add_request("long", LONG, GREEDY)
        engine.step()
        fail_next_prefill(engine, 1, error)
        engine.add_request("short", SHORT, GREEDY)
    outputs = drain(engine)
    (failed,) = outputs.pop(fails)
    assert failed.finish_reason == "error" and "MemoryError" in failed.error
    for name, found in outputs.items():
        assert tokens(found) == alone(make, {"short": SHORT, "long": LONG}[name], kv="shadowkv")
    assert len(outputs) == 1
    assert_empty(engine)


@pytest.mark.parametrize("where", ["between steps", "short", "long"])
def test_ctrl_c_while_both_are_at_work(make: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Deferred to the next step, and raised in a prefill where nobody defers it."""
    llm = LLM(str(tiny), load_format="dummy", kv="shadowkv", kv_dense_below=0, max_num_seqs=2, max_cached_seqs=1)
    step, seen = llm.engine.step, []

    def interrupted() -> list[TokenOutput]:
        outputs = step()
        if len(names(llm.engine)) == 2 and not seen:
            seen.append(names(llm.engine))
            if where == "between steps":
                signal.raise_signal(signal.SIGINT)
            else:
                one = llm.engine.prefill_queue.in_flight[("long", "short").index(where)]
                one.steps.close()
                one.steps = iter_raising()
        return outputs

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([LONG, SHORT], GREEDY)
    assert seen
    assert_empty(llm.engine)
    monkeypatch.undo()
    wanted = [alone(make, ids, kv="shadowkv") for ids in (LONG, SHORT)]
    assert [one.outputs[0].token_ids for one in llm.generate([LONG, SHORT], GREEDY)] == wanted


def iter_raising() -> Any:
    """The steps of a prefill that are interrupted."""
    raise KeyboardInterrupt
    yield


def test_prefill_stops_before_a_piece_would_be_too_much(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowkv.engine.scheduling.prefill_queue.Stopwatch", Pieces)
    engine = make(kv="full")
    engine.add_request("long", LONG, GREEDY)
    engine.prefill_queue.start()
    (one,) = engine.prefill_queue.in_flight
    for seconds, pieces in ((0.0, 1), (1.0, 1), (5.0, 4), (5.5, 5)):
        assert engine.prefill_queue.advance(seconds) is None
        assert one.watch.seconds == pieces
    engine.abort("long")
    assert_empty(engine)


def test_what_is_cached_but_cannot_be_extended_is_not_computed_again_beside_a_long_prompt(make: Any) -> None:
    """All of it is more than a block: it waits as any long prompt does."""
    engine, start = make(kv="full"), prompt(7, 400)
    engine.add_request("first", start, GREEDY)
    answer = tokens(drain(engine)["first"])
    turn = start + answer + prompt(8, 30)
    assert engine.scheduler.prefix_cache.match(engine.request("turn", turn, GREEDY).prompt) is not None
    engine.add_request("long", LONG, GREEDY)
    assert not engine.step()
    engine.cache.growth = lambda *_: engine.cache.total + engine.cache.total
    engine.add_request("turn", turn, GREEDY)
    for _ in range(3):
        engine.step()
        assert names(engine) == [["long"]]
    done = drain(engine)
    assert done["turn"][-1].cached_tokens == 0
    assert tokens(done["turn"]) == alone(make, turn, kv="full")
    assert tokens(done["long"]) == alone(make, LONG, kv="full")


def pieces_beside_one_that_decodes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each piece of a prompt is given from now on; a piece is as short as can be."""
    engine.add_request("first", SHORT, SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))
    while not engine.scheduler.running:
        engine.step()
    given, advance = list[float](), engine.prefill_queue.advance

    def a_piece(seconds: float) -> Any:
        given.append(seconds)
        return advance(0.0)

    monkeypatch.setattr(engine.prefill_queue, "advance", a_piece)
    return given


@pytest.mark.parametrize(("slots", "queued"), [(3, True), (2, False)])
def test_gaps_are_longer_only_while_a_prompt_waits_that_could_run(
    make: Any, monkeypatch: pytest.MonkeyPatch, slots: int, queued: bool
) -> None:
    monkeypatch.setattr("shadowkv.engine.engine.TOKEN_GAP", 100.0)
    monkeypatch.setattr("shadowkv.engine.engine.QUEUED_TOKEN_GAP", 200.0)
    engine: Engine = make(kv="full", max_num_seqs=slots)
    given = pieces_beside_one_that_decodes(engine, monkeypatch)
    engine.add_request("long", LONG, GREEDY)
    for number in range(2):
        engine.add_request(f"next-{number}", prompt(4 + number, 1500), GREEDY)
    engine.step()
    for number in range(2):  # one that waits is no more than one that runs
        engine.abort(f"next-{number}")
        engine.step()
    assert names(engine) == [["long"]]
    assert [seconds > 150 for seconds in given] == [queued, False, False]


def test_while_short_ones_wait_the_long_one_has_what_it_is_owed_at_a_time(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadowkv.engine.engine.TOKEN_GAP", 100.0)
    engine: Engine = make(kv="full", max_num_seqs=4)
    given = pieces_beside_one_that_decodes(engine, monkeypatch)
    engine.add_request("long", LONG, GREEDY)
    engine.step()
    (in_flight,) = engine.prefill_queue.in_flight
    in_flight.owed = 0.001
    engine.step()
    in_flight.owed = 0.001
    engine.add_request("short", SHORT, GREEDY)
    engine.step()
    assert given[0] > 0.01 and given[1] > 0.01 and given[2] == 0.001


def test_progress_is_told_to_those_who_ask_for_it(make: Any) -> None:
    engine = make(kv="full")
    engine.add_request("warm", LONG[:700], GREEDY)
    drain(engine)
    told = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, return_progress=True)
    engine.add_request("asks", LONG, told)
    engine.add_request("plain", prompt(4, 900), GREEDY)
    outputs = drain(engine)
    counts = [output.prefilled for output in outputs["asks"] if output.prefilled is not None]
    (cached,) = {output.cached_tokens for output in outputs["asks"]}
    assert 0 < cached <= counts[0] and counts == sorted(counts) and counts[-1] == len(LONG)
    assert len(counts) > 10 and counts[0] < 800
    assert [bool(output.token_ids) for output in outputs["asks"]] == [False] * (len(counts) - 1) + [True] * 3
    assert len(tokens(outputs["asks"])) == 3
    assert all(output.prefilled is None and output.token_ids for output in outputs["plain"])
    assert_empty(engine)
