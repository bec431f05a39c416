"""An engine that is reached over the wire: who is refused and when, what ends a request, and that nothing is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import zmq
from test_engine import assert_empty, leave_blocks, prompt

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.outputs import TextOutput
from shadowkv.engine.process import messages
from shadowkv.engine.process.client import EngineClient
from shadowkv.engine.process.launch import EngineProcess
from shadowkv.engine.request import EngineBusy, EngineDead, EngineStopped, RequestError
from tests.local_engine import LocalEngine

LONG = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
QUEUE = 6
AT_ONCE = 60.0
"""Seconds until a test gives up; a step that is held lasts longer."""


@pytest.fixture
def engine(tiny: Path) -> Iterator[LocalEngine]:
    settings = {"max_num_seqs": 4, "max_cached_seqs": 4, "max_queued_seqs": QUEUE, "kv": "full", "device": "cpu"}
    engine = LocalEngine(EngineConfig(model=str(tiny), load_format="dummy", **settings))
    engine.start()
    yield engine
    engine.shutdown(AT_ONCE)


async def outputs(
    engine: EngineClient, params: SamplingParams, *prompts: list[int], tenant: str = ""
) -> list[list[TextOutput]]:
    """All outputs for some prompts that are one client's request."""
    read: list[list[TextOutput]] = [[] for _ in prompts]
    async for number, output in engine.generate([engine.request(one, params, tenant) for one in prompts]):
        read[number].append(output)
    return read


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + AT_ONCE
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def run(work: Awaitable[Any]) -> None:
    async def within() -> None:
        await asyncio.wait_for(work, 2 * AT_ONCE)

    asyncio.run(within())


class HeldStep:
    """A context in which the engine is in the middle of a step, at work on a request of its own."""

    def __init__(self, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine, self._patch = engine, monkeypatch
        self._held, self._go_on = threading.Event(), threading.Event()

    async def __aenter__(self) -> None:
        decode = self._engine.engine.runner.decode

        def held(*arguments: Any, **more: Any) -> Any:
            self._held.set()
            assert self._go_on.wait(2 * AT_ONCE)
            return decode(*arguments, **more)

        self._patch.setattr(self._engine.engine.runner, "decode", held)
        self._work = asyncio.create_task(outputs(self._engine, SHORT, prompt(0, 9)))
        await until(self._held.is_set)

    async def __aexit__(self, *error: object) -> None:
        self._go_on.set()
        ((*_, last),) = await self._work
        assert last.finish_reason == "length"


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_wire_of_another_version_is_refused(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    told, stale = EngineClient._send, engine.another()

    def send(self: EngineClient, command: messages.Command) -> None:
        if self is stale and isinstance(command, messages.Greeting):
            command.version += 1
        told(self, command)

    monkeypatch.setattr(EngineClient, "_send", send)

    async def work() -> None:
        reason = rf"message version {messages.VERSION + 1}, and the engine has version {messages.VERSION}: restart"
        with pytest.raises(EngineDead, match=reason):
            await outputs(stale, SHORT, prompt(1, 9))
        assert not stale.is_alive
        with pytest.raises(EngineDead, match=reason):
            await stale.stats()
        stale.disconnect()
        await outputs(engine, SHORT, prompt(1, 9))  # the engine goes on for others

    run(work())


def test_what_is_no_message_at_all_harms_nobody(engine: LocalEngine) -> None:
    async def work() -> None:
        await outputs(engine, SHORT, prompt(1, 9))
        with zmq.Context.instance().socket(zmq.DEALER) as stranger:
            stranger.connect(messages.socket_address(engine.folder, engine.core.name))
            for message in (b"", b"\xc1", b"GET / HTTP/1.1", messages.encode({"type": "Add"}), bytes(1000)):
                stranger.send(message)
            stranger.send(messages.encode(messages.Statistics(1)))
            await until(lambda: stranger.poll(0))
        ((*_, last),) = await outputs(engine, SHORT, prompt(2, 9))
        assert last.finish_reason == "length"

    run(work())


def test_refusals_do_not_wait_for_a_step(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with HeldStep(engine, monkeypatch):
            waiting = [asyncio.create_task(outputs(engine, SHORT, prompt(seed, 9))) for seed in range(QUEUE)]
            await until(lambda: len(engine.core._in_flight) == 1 + QUEUE)
            with pytest.raises(EngineBusy, match=f"no more than {QUEUE} requests may wait"):
                await asyncio.wait_for(outputs(engine, SHORT, prompt(99, 9)), AT_ONCE)
            assert (await asyncio.wait_for(engine.stats(), AT_ONCE)).running == 1
        answers = [answer for one in waiting for answer in await one]
        assert [sum(len(output.token_ids) for output in answer) for answer in answers] == [3] * QUEUE

    run(work())
    assert_empty(engine.engine)


def test_two_tenants_that_fill_the_queue_leave_room_for_others(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with HeldStep(engine, monkeypatch):
            asked = [
                asyncio.create_task(outputs(engine, SHORT, prompt(seed, 9), tenant=tenant))
                for tenant in "ab"
                for seed in range(QUEUE)
            ]
            await until(lambda: len(engine.core._in_flight) == 1 + 2 * QUEUE)
            asked.append(asyncio.create_task(outputs(engine, SHORT, prompt(98, 9), tenant="c")))
            await until(lambda: len(engine.core._in_flight) == 2 + 2 * QUEUE)
            with pytest.raises(EngineBusy):
                await asyncio.wait_for(outputs(engine, SHORT, prompt(99, 9), tenant="c"), AT_ONCE)
        for one in asked:
            await one

    run(work())
    assert_empty(engine.engine)


def test_what_memory_has_no_room_for_is_refused_during_a_step(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_blocks(engine.engine, device=4, host=0)

    async def work() -> None:
        async with HeldStep(engine, monkeypatch):
            with pytest.raises(
                RequestError, match=r"500 prompt tokens and max_tokens=1500 need .* blocks of the KV cache"
            ):
                await asyncio.wait_for(outputs(engine, LONG, prompt(3, 500)), AT_ONCE)

    run(work())


def test_of_several_choices_none_is_left_when_one_is_refused(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with HeldStep(engine, monkeypatch):
            with pytest.raises(EngineBusy):
                await asyncio.wait_for(outputs(engine, LONG, *(prompt(seed, 9) for seed in range(QUEUE + 1))), AT_ONCE)
        await until(lambda: not engine.core._in_flight)

    run(work())
    assert not engine._answers
    assert_empty(engine.engine)


def test_a_request_whose_id_is_in_use_ends_itself_alone(engine: LocalEngine) -> None:
    async def work() -> None:
        first, second = engine.request(prompt(1, 9), LONG), engine.request(prompt(2, 9), SHORT)
        async with aclosing(engine.generate([first])) as answer:
            await anext(answer)
            second.request_id = first.request_id
            with pytest.raises(RequestError, match="is in use"):
                async for _ in engine.generate([second]):
                    pass
        await outputs(engine, SHORT, prompt(3, 9))

    run(work())


@pytest.mark.parametrize("schema", [None, "{}"], ids=["no schema", "a schema"])
def test_a_fault_while_a_request_is_made_ends_it_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, schema: str | None
) -> None:
    async def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.requests, "_prompt", None)
            params = SamplingParams(max_tokens=3, json_schema=schema)
            ((failed,),) = await asyncio.wait_for(outputs(engine, params, prompt(1, 9)), AT_ONCE)
            assert (failed.finish_reason, failed.prompt_tokens) == ("error", 9)
            assert failed.error == "internal error (TypeError); the log has the details"
        await outputs(engine, SHORT, prompt(1, 9))

    run(work())
    assert not engine.core._in_flight
    assert_empty(engine.engine)


# -- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [1, 3])
def test_a_stop_string_ends_the_request_in_the_engine_and_its_sequence_stays_cached(
    engine: LocalEngine, choices: int
) -> None:
    sampled = {"max_tokens": 1500, "ignore_eos": True, "seed": 7}
    prompts = [prompt(seed, 200) for seed in range(choices)]

    async def work() -> None:
        whole = await outputs(engine, SamplingParams(**{**sampled, "max_tokens": 60}), *prompts)
        text = "".join(output.text for output in whole[0])
        candidates = (text[at : at + 3] for at in range(20, 50) if text.find(text[at : at + 3]) == at)
        stop = next(one for one in candidates if "�" not in one)
        params = SamplingParams(**sampled, stop=(stop,))
        read: list[list[TextOutput]] = [[] for _ in prompts]
        async with aclosing(engine.generate([engine.request(one, params) for one in prompts])) as answers:
            async for number, output in answers:
                assert not read[number] or read[number][-1].finish_reason is None, "more after its end"
                read[number].append(output)
                if read[0] and read[0][-1].finish_reason is not None:
                    break
        last = read[0][-1]
        assert (last.finish_reason, last.stop_string) == ("stop", stop)
        assert "".join(output.text for output in read[0]) == text.partition(stop)[0]
        assert last.completion_tokens == sum(len(output.token_ids) for output in read[0]) < 60
        await until(lambda: not engine.engine.has_work)  # long before 1,500 tokens
        ((again,),) = await outputs(engine, SamplingParams(max_tokens=1), [*prompts[0], *whole[0][0].token_ids])
        assert again.cached_tokens >= 192

    run(work())
    assert not engine.core._in_flight and not engine._answers
    assert_empty(engine.engine)


def test_nothing_comes_for_an_answer_after_its_end(engine: LocalEngine) -> None:
    """Though the engine, which sees no text, goes on with it until it is told: here much later."""
    stop, sampled = tuple("abcdefghijklmnopqrstuvwxyz ,.;:-"), {"ignore_eos": True, "seed": 7}
    until_then = SamplingParams(max_tokens=300, **sampled)
    stopped = SamplingParams(max_tokens=1500, stop=stop, **sampled)

    async def work() -> None:
        ended: set[int] = set()
        requests = [engine.request(prompt(seed, 9), stopped if seed else until_then) for seed in range(4)]
        async for number, output in engine.generate(requests):
            assert number not in ended
            if output.finish_reason is not None:
                ended.add(number)
            time.sleep(0.02)  # the event loop is busy
            await asyncio.sleep(0)
        assert ended == {0, 1, 2, 3}

    run(work())


def test_clients_that_leave_at_any_time_leave_nothing(engine: LocalEngine) -> None:
    async def leave(number: int) -> None:
        answer = engine.generate([engine.request(prompt(number, 9 + number), LONG)])
        async with aclosing(answer):
            for _ in range(number % 5):
                await anext(answer)

    async def work() -> None:
        for number in range(40):
            await leave(number)
        for number in range(10):  # before anything has come
            task = asyncio.create_task(outputs(engine, LONG, prompt(number, 300)))
            await asyncio.sleep(0.001 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: len(engine.core._in_flight) < 2)
        with pytest.raises(asyncio.TimeoutError):
            async for _ in engine.generate([engine.request(prompt(1, 9), LONG)], timeout=0.05):
                pass
        await until(lambda: not engine.core._in_flight and not engine.engine.has_work)

    run(work())
    assert not engine._answers and not engine._questions and not engine.core._saves and not engine.core._answers
    assert_empty(engine.engine)


# -- several tokens at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_a_client_that_is_behind_reads_the_same(engine: LocalEngine, stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=3, stop=stop, logprobs=2, prompt_logprobs=1)

    async def read(wait: Callable[[], Awaitable[None]]) -> AsyncIterator[TextOutput]:
        async with aclosing(engine.generate([engine.request(prompt(5, 50), params)])) as answer:
            async for _, output in answer:
                yield output
                await wait()

    async def work() -> None:
        async def be_slow() -> None:
            await asyncio.sleep(0.03)

        step_by_step = [output async for output in read(lambda: asyncio.sleep(0))]
        behind = [output async for output in read(be_slow)]
        assert len(behind) < len(step_by_step) and max(len(output.token_ids) for output in behind) > 1
        assert "".join(o.text for o in behind) == "".join(o.text for o in step_by_step)
        for field in ("token_ids", "logprobs", "prompt_logprobs"):
            read_behind, read_at_once = (
                [item for output in one for item in getattr(output, field) or ()] for one in (behind, step_by_step)
            )
            assert read_behind == read_at_once and read_behind, field
        assert behind[-1].completion_tokens == 200 == len([token for o in behind for token in o.token_ids])

    run(work())


# -- the end of everything -----------------------------------------------------------------------------------------


def test_an_engine_that_dies_tells_all_clients_why(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise SystemError("boom")

    async def work() -> None:
        other = engine.another()
        in_flight = [asyncio.create_task(outputs(one, LONG, prompt(1, 9))) for one in (engine, other)]
        await until(lambda: len(engine.engine.scheduler.running) == 2)
        monkeypatch.setattr(engine.engine.runner, "decode", die)
        for task in in_flight:
            with pytest.raises(EngineDead, match="boom"):
                await task
        for one in (engine, other):
            assert not one.is_alive
            one.stopping = True  # as by a server that stops because its engine has died
            with pytest.raises(EngineDead, match="boom"):
                await one.stats()
        other.disconnect()

    run(work())


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("stopped_first", [False, True])
def test_what_ends_an_engine_first_is_the_reason(engine: LocalEngine, connected: bool, stopped_first: bool) -> None:
    async def work() -> None:
        client = engine.another()
        if connected:
            client.connect()
        client.stopping = stopped_first
        client.has_ended("the engine has died: its process has ended")
        await until(lambda: not client.is_alive)
        client.stopping = True
        client.has_ended("a second reason")
        await asyncio.sleep(0)
        error = client.end()
        assert isinstance(error, EngineStopped) == stopped_first
        assert stopped_first or str(error) == "the engine has died: its process has ended"
        client.disconnect()

    run(work())


def test_a_fault_in_a_question_is_told_rather_than_waited_for(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise SystemError("boom")

    async def work() -> None:
        with monkeypatch.context() as patch:
            failed: Future[None] = Future()
            failed.set_exception(SystemError("boom"))
            patch.setattr(engine.engine.requests.grammars, "compile", lambda *_: failed)
            with pytest.raises(RuntimeError, match="SystemError: boom"):
                await engine.compile_grammar("{}")
        await outputs(engine, SHORT, prompt(1, 9))  # that was on a thread of its own
        monkeypatch.setattr(engine.engine, "stats", fail)
        with pytest.raises(EngineDead, match="boom"):
            await engine.stats()

    run(work())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [({"model": "nowhere"}, OSError, "nowhere"), ({"max_model_len": 10**6}, ValueError, "max_model_len=1000000")],
    ids=["here", "in the engine's process"],
)
def test_a_process_that_cannot_start_says_why_and_leaves_nothing(
    tiny: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    settings = {"model": str(tiny), "load_format": "dummy", "device": "cpu", **changes}
    process = EngineProcess(EngineConfig(**settings))
    with pytest.raises(error, match=words):
        _ = process.clients
    assert not Path(process.folder).exists()
    assert process._process.poll() is not None


def test_starting_an_engine_needs_no_pytorch_before_its_process() -> None:
    """Both then import it at the same time."""
    code = "import sys, shadowkv.engine.process.launch\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
