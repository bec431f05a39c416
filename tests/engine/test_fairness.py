"""Who is next: tenants take turns by tokens, and nobody's requests stop another's short ones."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import pytest

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.outputs import RequestTimes, TokenOutput
from shadowkv.engine.request import Request
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.scheduling import prefill_queue
from shadowkv.engine.scheduling.waiting_queue import AHEAD, OUTPUT_COST, PATIENCE, WaitingQueue

SECOND_PER_TOKEN = 0.01


def request(name: str, tokens: int, arrival: float = 0.0, priority: int = 0) -> Request:
    """One whose tenant is the first letter of its name."""
    made = Request(name, [1] * tokens, SamplingParams(), 8, 0, tenant=name[0], priority=priority)
    made.times = RequestTimes(arrival)
    return made


def queue_of(*requests: Request, policy: str = "fair") -> WaitingQueue:
    queue = WaitingQueue(policy)
    for one in requests:
        queue.add(one, SECOND_PER_TOKEN * len(one.prompt_token_ids))
    return queue


def names(queue: WaitingQueue) -> list[str]:
    return [one.request_id for one in queue.ordered()]


def test_tenants_take_turns_by_tokens() -> None:
    queue = queue_of(*(request(f"a{n}", 100) for n in range(4)), *(request(f"b{n}", 50) for n in range(4)))
    assert names(queue) == ["b0", "a0", "b1", "b2", "a1", "b3", "a2", "a3"]


def test_who_comes_later_or_again_begins_with_the_least_of_those_who_are_there() -> None:
    a, b = [request(f"a{n}", 100) for n in range(6)], [request(f"b{n}", 100) for n in range(6)]
    queue = queue_of(*a, b[0])
    for one in (a[0], a[1], b[0], a[2]):
        queue.start(one, 100)
    for one in (a[0], a[1], b[0]):
        queue.end(one)  # b is gone, a has had more
    queue.add(b[1], 1.0)
    queue.add(b[2], 1.0)
    assert names(queue) == ["b1", "a3", "a4", "b2", "a5"]


def test_what_was_generated_counts() -> None:
    a, b = [request(f"a{n}", 10) for n in range(3)], [request(f"b{n}", 10) for n in range(3)]
    queue = queue_of(*a, *b)
    for one in (a[0], b[0], a[1], b[1]):
        queue.start(one, 10)
    a[0].output_token_ids += [1] * 100
    queue.end(a[0])
    assert names(queue) == ["b2", "a2"]
    b[0].output_token_ids += [1] * (100 + 10 // OUTPUT_COST)
    queue.end(b[0])
    assert names(queue) == ["a2", "b2"]


def test_a_tenant_without_anything_at_work_is_first() -> None:
    a, b = [request(f"a{n}", 10) for n in range(3)], [request(f"b{n}", 1000) for n in range(3)]
    queue = queue_of(*a, *b)
    queue.start(b[0], 1000)
    queue.end(b[0])  # has had more, and nothing is computed for it now
    queue.start(a[0], 10)
    assert names(queue)[0] == "b1" and queue.newcomers == {"b"} and queue.has_newcomers
    assert queue.is_shared(a[1])
    queue.start(b[1], 1000)
    assert names(queue)[0] == "a1" and not queue.has_newcomers


def test_a_tenant_that_has_had_much_more_is_no_newcomer() -> None:
    a, b = [request(f"a{n}", 10) for n in range(2)], [request(f"b{n}", AHEAD // 2) for n in range(4)]
    queue = queue_of(*a, *b)
    queue.start(a[0], 10)
    for one in b[:2]:
        assert names(queue)[0] == one.request_id and queue.newcomers == {"b"}
        queue.start(one, AHEAD // 2)
        queue.end(one)
    assert names(queue)[0] == "b2" and queue.newcomers == {"b"}  # by what a has had
    queue.start(b[2], AHEAD // 2)
    queue.end(b[2])
    assert names(queue) == ["a1", "b3"] and not queue.newcomers
    a[0].output_token_ids += [1] * (AHEAD // OUTPUT_COST)
    assert queue.has_newcomers and names(queue) == ["b3", "a1"]  # as answers grow, though nothing comes or ends


def test_what_is_generated_counts_before_it_has_ended() -> None:
    a, b = [request(f"a{n}", 10) for n in range(2)], [request(f"b{n}", 10) for n in range(3)]
    queue = queue_of(*a, *b)
    for one in (a[0], b[0], b[1]):
        queue.start(one, 10)
    assert names(queue) == ["a1", "b2"]
    a[0].output_token_ids += [1] * 20
    queue.end(b[0])
    assert names(queue) == ["b2", "a1"]


def test_a_tenants_shortest_is_first_until_another_has_waited() -> None:
    long, patience = request("a-long", 1000), PATIENCE * SECOND_PER_TOKEN * 1000
    queue = queue_of(long, request("a-soon", 10, patience / 2), request("a-late", 10, patience))
    assert names(queue) == ["a-soon", "a-long", "a-late"]


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["a0", "a1", "b0", "a2"]), ("priority", ["a2", "b0", "a0", "a1"])]
)
def test_other_policies(policy: str, order: list[str]) -> None:
    requests = request("a0", 9), request("a1", 9), request("b0", 9, priority=-1), request("a2", 9, priority=-2)
    queue = queue_of(*requests, policy=policy)
    assert names(queue) == order
    assert queue.newcomers == ({"a", "b"} if policy == "priority" else set())


def test_requests_without_a_tenant_leave_no_room_and_need_none() -> None:
    one = request("x", 9)
    one.tenant = ""
    queue = queue_of(one)
    assert not queue.has_newcomers and not queue.newcomers and not queue.is_shared(one)


def test_who_is_gone_is_forgotten() -> None:
    queue = WaitingQueue("fair")
    for number in range(100):
        one = request("x", 9)
        one.tenant = f"address {number}"
        queue.add(one, 0.0)
        queue.start(one, 9)
        queue.end(one)
    assert len(queue) == 0 and not queue._waiting
    assert len(queue._had) <= 1  # of the last one


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(
        "smollm2-135m-instruct", max_num_seqs=3, max_model_len=2048, device="cpu", max_num_batched_tokens=512
    )
    engine = Engine(config)
    yield engine
    engine.close()


def add(engine: Engine, name: str, tokens: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    prompt = [100 + (crc32(name.encode()) + number) % 4000 for number in range(tokens)]
    engine.add(engine.requests.request(name, prompt, params, tenant=name[0]))


def test_a_short_question_overtakes_everything_of_another_tenant(engine: Engine) -> None:
    for number in range(3):
        add(engine, f"a{number}", 50, 1000)
    while engine.num_running < 3 or engine.prefill_queue.in_flight:
        engine.step()  # all places are taken
    for number in range(3, 8):
        add(engine, f"a{number}", 1200, 50)
    for _ in range(3):
        engine.step()
    add(engine, "b", 12, 4)
    outputs: list[TokenOutput] = []
    steps = 0
    while not any(output.request_id == "b" and output.token_ids for output in outputs):
        outputs += engine.step()
        steps += 1
    assert steps <= 20  # those of the others have a thousand to come
    while not any(output.request_id == "b" and output.finish_reason for output in outputs):
        outputs += engine.step()
    ended = {output.request_id for output in outputs if output.finish_reason}
    assert ended == {"b"}


def test_a_short_question_overtakes_a_pack_that_is_being_computed(engine: Engine) -> None:
    for number in range(6):
        add(engine, f"a{number}", 220, 4)
    engine.step()
    assert [prefill.tokens for prefill in engine.prefill_queue.in_flight] == [440]
    add(engine, "b", 12, 4)
    outputs: list[TokenOutput] = []
    while not outputs:
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"b"}
    while engine.has_work:
        outputs += engine.step()
    ended = [output.request_id for output in outputs if output.finish_reason]
    assert sorted(ended) == ["a0", "a1", "a2", "a3", "a4", "a5", "b"]
    assert not engine.scheduler.running and len(engine.scheduler.waiting) == 0


def test_short_questions_one_after_another_leave_a_long_prompt_its_share(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_queue, "MAX_OWED", 0.0)
    add(engine, "a", 300, 1)
    engine.step()
    (long,) = engine.prefill_queue.in_flight
    for number in range(40):
        if not engine.prefill_queue.in_flight:
            break
        add(engine, f"b{number}", 12, 1)
        while not any(output.request_id == f"b{number}" for output in engine.step()):
            assert engine.has_work
    assert long.done == long.pieces and number < 39


def test_what_does_not_fit_yet_keeps_no_other_tenants_short_question_waiting(engine: Engine) -> None:
    paged = engine.cache.groups[0].store.tiers["device"]
    add(engine, "a", 100, 1000)
    while engine.num_running < 1:
        engine.step()
    spare = engine.scheduler._spare["device"]
    paged.allocate(engine.cache.free["device"] - spare)  # as much is left as short questions of others are left
    add(engine, "c", 10, 2030)
    add(engine, "b", 12, 4)
    outputs: list[TokenOutput] = []
    for _ in range(100):
        outputs += engine.step()
    assert {output.request_id for output in outputs if output.finish_reason} == {"b"}
    assert [one.request_id for one in engine.scheduler.waiting] == ["c"]
