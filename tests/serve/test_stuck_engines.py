"""Engines that are alive and do not answer (SIGSTOP), or whose step does not end (a device that hangs)."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_processes import SECONDS, Server, server
from several_engines import LONG_ANSWER, LONGER, TWO, Stream, engines, samples, two_streams

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.process import heartbeat
from shadowkv.engine.process.launch import EngineProcess
from shadowkv.engine.sampling_params import SamplingParams
from tests.local_engine import LocalEngine
from tests.waiting import wait_until

SCHEMA = {"json": {"type": "integer"}}


def health(one: Server) -> tuple[int, Any]:
    answer = httpx.get(f"{one.url}/health", timeout=SECONDS)
    return answer.status_code, answer.json()


def load(one: Server) -> int:
    answer: int = httpx.get(f"{one.url}/load", timeout=SECONDS).json()["server_load"]
    return answer


def test_an_engine_that_is_stopped_holds_up_nothing_but_its_requests(tiny_model: Path) -> None:
    with (
        server(tiny_model, TWO, LONGER) as one,
        ThreadPoolExecutor(4) as clients,
        two_streams(one, **LONG_ANSWER) as streams,
    ):
        first, second = engines(one)
        second.suspend()
        streams[0].last()
        wait_until(lambda: samples(one, "num_requests_running") == {"0": 0.0, "1": 1.0})
        assert load(one) == 1, "its requests wait, and count"
        wait_until(lambda: health(one) == (200, {"status": "ok", "engines": ["ok", "stuck"]}))
        assert samples(one, "engine_stuck") == {"0": 0.0, "1": 1.0} and samples(one, "replicas") == {"": 1.0}

        asked = [clients.submit(one.ask, prompt=[number] * 40, max_tokens=2) for number in range(4)]
        asked.append(clients.submit(one.ask, structured_outputs=SCHEMA, ignore_eos=False, max_tokens=2))
        assert [answer.result()[0].status_code for answer in asked] == [200] * 5
        assert httpx.get(f"{one.url}/page/stats", timeout=SECONDS).status_code == 200
        assert samples(one, "num_requests_running")["1"] == 1.0 and "[DONE]" not in streams[1].text

        second.resume()
        assert streams[1].last()["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: health(one) == (200, {"status": "ok", "engines": ["ok", "ok"]}))
        assert samples(one, "engine_stuck") == {"0": 0.0, "1": 0.0} and samples(one, "replicas") == {"": 2.0}
        first.suspend()  # so that only the other one answers
        wait_until(lambda: health(one)[1]["engines"] == ["stuck", "ok"])
        assert one.ask(prompt=[50] * 40, max_tokens=2)[0].status_code == 200
        first.resume()
        log = one.log.read_text()
        assert log.count("engine 1 is stuck: it has not answered for 5 s\n") == 1
        assert log.count("engine 1 is no longer stuck\n") == 1 and "Traceback" not in log


def test_a_server_whose_only_engine_is_stopped_says_so(tiny_model: Path) -> None:
    with server(tiny_model, LONGER) as one:
        stream = Stream(one, **LONG_ANSWER).begun()
        wait_until(lambda: one.gauge("num_requests_running") == 1)
        one.engine.suspend()
        wait_until(lambda: health(one) == (503, {"status": "stuck"}))
        assert load(one) == one.gauge("num_requests_running") == one.gauge("engine_stuck") == 1
        one.engine.resume()
        assert stream.last()["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: health(one) == (200, {"status": "ok"}))
        assert one.gauge("engine_stuck") == 0


def test_an_engine_that_is_stuck_gets_no_time_to_end(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    config = EngineConfig(model=str(tiny_model), load_format="dummy", device="cpu", kv="full", max_num_seqs=2)
    process = EngineProcess(config)
    [client] = process.clients

    async def stopped() -> float:
        client.connect()
        psutil.Process(process._process.pid).suspend()
        while client.state != "stuck":
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await asyncio.to_thread(process.stop, SECONDS)
        client.disconnect()
        return time.monotonic() - began

    assert asyncio.run(asyncio.wait_for(stopped(), 2 * SECONDS)) < SECONDS
    assert not Path(process.folder).exists()


def test_an_engine_whose_step_does_not_end_is_stuck(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    config = EngineConfig(model=str(tiny_model), load_format="dummy", device="cpu", kv="full", max_num_seqs=2)
    engine, go_on = LocalEngine(config), threading.Event()
    decode = engine.engine.runner.decode

    def held(*arguments: Any, **more: Any) -> Any:
        assert go_on.wait(SECONDS)
        return decode(*arguments, **more)

    async def answered() -> None:
        request = engine.request([5] * 40, SamplingParams(max_tokens=4, ignore_eos=True))
        async for _ in engine.generate([request]):
            pass

    async def becomes(state: str) -> None:
        while engine.state != state:
            await asyncio.sleep(0.01)

    async def work() -> None:
        await answered()
        assert engine.state == "ok"
        monkeypatch.setattr(heartbeat, "STEP_SECONDS", 0.1)
        monkeypatch.setattr(engine.engine.runner, "decode", held)
        answer = asyncio.create_task(answered())
        await becomes("stuck")
        stats = await engine.stats()
        assert stats.running == 1 and stats.step_seconds > 0.1
        monkeypatch.setattr(heartbeat, "STEP_SECONDS", SECONDS)
        go_on.set()
        await answer
        await becomes("ok")
        await asyncio.sleep(0.1)
        assert (await engine.stats()).step_seconds == 0, "it waits for work"

    engine.start()
    try:
        asyncio.run(asyncio.wait_for(work(), SECONDS))
    finally:
        engine.shutdown(SECONDS)
