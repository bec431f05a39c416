"""Nobody is read or tokenised for whom nobody waits: clients that hang up, tenants with much in the queue, the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from http_server import http_server
from test_serve_errors import error_of

from shadowkv.models.tokenization.text_encoder import TextEncoder, panics_as_errors
from shadowkv.serve.app import build_app
from shadowkv.serve.bodies import reader as body_reader
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.reader import SHORT_BYTES, BodyReader
from shadowkv.serve.text.tokenization import LONG, TURNS, drop_long, in_turn

JSON = {"Content-Type": "application/json"}
LONG_BODY = json.dumps({"prompt": "a", "user": "a" * SHORT_BYTES}).encode()


def sleeps(raw: bytes) -> None:
    """Takes longer than any test."""
    time.sleep(3600)


def length(raw: bytes) -> int:
    return len(raw)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture
def reader():
    reader = BodyReader(2**25)
    yield reader
    reader.close()


def in_flight(reader):
    return [process for process in reader.working if process.is_running]


def test_a_tenant_with_much_to_read_keeps_no_other_waiting(reader):
    async def run() -> None:
        many = [asyncio.create_task(reader.apart(b"a", sleeps, "a")) for _ in range(5)]
        await until(lambda: in_flight(reader))
        assert await reader.apart(b"bb", length, "b") == 2
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 300))


def test_what_nobody_waits_for_is_killed(reader):
    async def run() -> None:
        reading = asyncio.create_task(reader.apart(b"a", sleeps, "a"))
        waiting = asyncio.create_task(reader.apart(b"a", sleeps, "a"))
        await until(lambda: in_flight(reader))
        (process,) = in_flight(reader)
        waiting.cancel()
        reading.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)
        assert process.has_ended and not reader.idle
        assert await reader.apart(b"aaa", length, "a") == 3

    asyncio.run(asyncio.wait_for(run(), 300))


def test_what_is_being_read_at_the_end_is_refused(reader):
    async def run() -> None:
        tasks = [asyncio.create_task(reader.apart(b"a", sleeps, tenant)) for tenant in "aabb"]
        await until(lambda: len(in_flight(reader)) == 2)
        reader.close()
        for task in (*tasks, asyncio.create_task(reader.apart(b"a", sleeps, "c"))):
            with pytest.raises(ApiError, match="the server is stopping") as caught:
                await task
            assert caught.value.status == 503 and caught.value.code == "server_stopping"

    asyncio.run(asyncio.wait_for(run(), 300))


def test_a_process_without_work_ends_after_a_while(reader, monkeypatch):
    async def run() -> None:
        monkeypatch.setattr(body_reader, "IDLE_SECONDS", 0.01)
        assert await reader.apart(b"aa", length) == 2
        await until(lambda: not reader.idle)
        monkeypatch.setattr(body_reader, "IDLE_SECONDS", 3600.0)
        assert await reader.apart(b"aaa", length) == 3
        (process,) = reader.idle
        assert await reader.apart(b"aaaa", length) == 4
        assert reader.idle == [process] and not process.has_ended

    asyncio.run(asyncio.wait_for(run(), 300))


def test_the_body_of_a_client_that_hangs_up_is_read_no_longer(engine):
    app = build_app(engine, "fake")
    bodies = app.state.bodies
    with http_server(app) as url:
        assert httpx.post(f"{url}/v1/completions", content=LONG_BODY, headers=JSON, timeout=300).status_code == 200
        (process,) = bodies.idle
        os.kill(process.pid, signal.SIGSTOP)
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(LONG_BODY)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + LONG_BODY)
            while process not in bodies.working:
                time.sleep(0.01)
        while bodies.working:
            time.sleep(0.01)
        assert process.has_ended and not bodies.idle


def test_the_body_of_a_response_is_kept_for_what_continues_it(call):
    first = call("POST", "/v1/responses", json={"input": "a", "metadata": {}, "user": "a" * SHORT_BYTES}).json()
    again = {"input": "b", "previous_response_id": first["id"], "user": "a" * SHORT_BYTES}
    assert call("POST", "/v1/responses", json=again).status_code == 200


class Work:
    """What takes a turn until it is told to end."""

    def __init__(self) -> None:
        self.began, self.ends = threading.Semaphore(0), threading.Event()
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.began.release()
        assert self.ends.wait(300)


def test_a_tenant_with_many_long_texts_keeps_no_other_waiting():
    async def run() -> None:
        work = Work()
        many = [asyncio.create_task(in_turn("a", LONG + 1, work)) for _ in range(20)]
        await asyncio.to_thread(lambda: [work.began.acquire() for _ in range(TURNS - 1)])
        assert await in_turn("b", LONG + 1, lambda: "at once") == "at once"
        assert work.count == TURNS - 1
        work.ends.set()
        await asyncio.gather(*many)
        assert work.count == 20

    asyncio.run(asyncio.wait_for(run(), 300))


def test_a_text_that_waits_is_dropped_and_one_at_work_keeps_its_turn():
    async def run() -> None:
        work = Work()
        tasks = [asyncio.create_task(in_turn("a", LONG + 1, work)) for _ in range(TURNS)]
        await asyncio.to_thread(lambda: [work.began.acquire() for _ in range(TURNS - 1)])
        tasks[0].cancel()  # its work goes on
        tasks[-1].cancel()  # it waits
        later = asyncio.create_task(in_turn("a", LONG + 1, work))
        await asyncio.sleep(0.1)
        assert work.count == TURNS - 1 and not tasks[0].done() and tasks[-1].cancelled()
        drop_long()
        with pytest.raises(ApiError, match="the server is stopping"):
            await later
        work.ends.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert tasks[0].cancelled() and work.count == TURNS - 1

    asyncio.run(asyncio.wait_for(run(), 300))


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/completions"])
def test_what_waits_is_refused_in_json_when_the_server_ends(engine, path, monkeypatch):
    engine.max_model_len = 10**6
    work, long = Work(), "a" * (LONG + 1)
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: work() or [97])
    body = {"prompt": long} if "messages" not in path else {"messages": [{"role": "user", "content": long}]}
    app = build_app(engine, "fake")

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            asked = [asyncio.create_task(client.post(path, json=body)) for _ in range(TURNS)]
            await asyncio.to_thread(lambda: [work.began.acquire() for _ in range(TURNS - 1)])
            while not any(task.done() for task in asked):  # the last one waits, or is about to
                await app.state.drop()
                await asyncio.sleep(0.01)
            work.ends.set()
            return await asyncio.gather(*asked)

    answers = asyncio.run(asyncio.wait_for(run(), 300))
    assert sorted(answer.status_code for answer in answers) == [200] * (TURNS - 1) + [503]
    (refused,) = [answer.json()["error"] for answer in answers if answer.status_code == 503]
    assert refused["message"] == "the server is stopping"


def test_a_text_for_which_nobody_waits_is_tokenised_no_further(tokenizer):
    class Slow:
        pieces = 0

        def __getattr__(self, name):
            return getattr(tokenizer.backend, name)

        def encode_batch_fast(self, texts, **options):
            self.pieces += 1
            began.set()
            assert go.wait(300)
            return tokenizer.backend.encode_batch_fast(texts, **options)

    began, go, text = threading.Event(), threading.Event(), "word " * 2**17
    slow = Slow()
    texts = TextEncoder(slow)

    async def run(drops: bool) -> None:
        began.clear()
        go.clear()
        slow.pieces = 0
        task = asyncio.create_task(in_turn("a", len(text), lambda: texts.encode(text, add_special_tokens=False)))
        await asyncio.to_thread(began.wait, 300)
        if drops:
            drop_long()
        else:
            task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(ApiError if drops else asyncio.CancelledError):
            await task
        assert slow.pieces == 1

    for drops in (False, True):
        asyncio.run(asyncio.wait_for(run(drops), 300))


class PanicException(BaseException):
    """As the library's, which is no Exception."""


def test_a_panic_of_the_library_is_an_error_in_json(call, engine, monkeypatch, caplog):
    def panics(*_, **__):
        with panics_as_errors():
            raise PanicException("unwrap on an Err")

    monkeypatch.setattr(engine.tokenizer, "encode", panics)
    for size in (1, LONG + 1):
        engine.max_model_len = 10**6
        for path in ("/tokenize", "/v1/completions"):
            error = error_of(call("POST", path, json={"prompt": "a" * size}), 500)
            assert "the server's log has the details" in error["message"]
    assert "unwrap on an Err" in caplog.text
