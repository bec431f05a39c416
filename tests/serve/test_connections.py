"""Clients that are slow, silent or hostile: who is cut off, when and how, and who is not."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from fake_engine import REPLY, FakeEngine
from http_server import http_server
from replies import events
from starlette.responses import Response

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.serve.process import FILES_BESIDE
from tests.waiting import wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

PATIENT = 10.0
"""Seconds, of time-outs that are to cut nobody off: on a busy machine a client that is merely slow may stall for 4."""


class Served:
    """A server, and what it counts: to be asked for over a connection, that would have to be in time itself."""

    def __init__(self, engine: FakeEngine, **settings) -> None:
        self.app = build_app(engine, "fake", ServerSettings(**settings))

    def metric(self, name: str, reason: str = "") -> float:
        (value,) = [
            sample.value
            for family in self.app.state.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"shadowkv:{name}" and reason in sample.labels.get("reason", "")
        ]
        return value


@contextmanager
def served(engine: FakeEngine, **settings) -> Iterator[tuple[str, Served]]:
    server = Served(engine, **settings)
    with http_server(server.app) as url:
        yield url, server


@contextmanager
def arrived(server: Served, *sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections of clients whose bytes are there before the server is: on no machine are they late."""
    listener = socket.create_server(("127.0.0.1", 0))
    with ExitStack() as stack:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        clients = [stack.enter_context(connect(url)) for _ in sent]
        for client, data in zip(clients, sent, strict=True):
            client.sendall(data)
        with http_server(server.app, listener), ExitStack() as asking:
            for client in clients:
                asking.enter_context(client)  # closed before the server ends, which waits for its clients
            yield clients


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(300)
    connection.connect((host, int(port)))
    return connection


def post(connection: socket.socket, **body) -> None:
    data = json.dumps(body).encode()
    connection.sendall(HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)


def rest(connection: socket.socket) -> bytes:
    """All that still comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def drip(connection: socket.socket, interval: float = 0.05) -> bytes:
    """Sends a byte now and then; what the server has said when it closes."""
    with ThreadPoolExecutor(1) as reader:
        answer = reader.submit(rest, connection)
        while not answer.done():
            try:
                connection.sendall(b"x")
            except OSError:
                break
            time.sleep(interval)
        try:
            return answer.result()
        except ConnectionResetError:  # a byte came in after the end
            return b""


def error_of(answer: bytes) -> tuple[int, str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), error["code"], error["message"]


def test_a_header_that_does_not_come(engine):
    server, start = Served(engine, client_header_timeout=0.5), time.monotonic()
    with arrived(server, b"", HEAD, HEAD + b"X-Long: ") as (silent, half, slow):
        drip(slow)
        status, code, message = error_of(rest(half))
        assert (status, code) == (408, "header_timeout") and "0.5 s (--client-header-timeout)" in message
        assert rest(silent) == b""
        assert time.monotonic() - start >= 0.5
        assert server.metric("connections_cut_total", "header_timeout") == 3


def a_second_request_that_does_not_come(engine):
    server, start = Served(engine, client_header_timeout=0.5, timeout_keep_alive=round(PATIENT)), time.monotonic()
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    with arrived(server, ask + b"\r\n", ask + b"\r\n", ask + b"Content-Length: 1000\r\n\r\n") as clients:
        idle, half, dripping = clients
        assert half.recv(4096).startswith(b"HTTP/1.1 200")
        half.sendall(ask)
        assert error_of(rest(half))[:2] == (408, "header_timeout")
        # An answer that did not wait for the body does not make the rest of it welcome for ever.
        assert drip(dripping, 0.02).count(b"HTTP/1.1") <= 1
        assert rest(idle).startswith(b"HTTP/1.1 200")  # uvicorn's own clock, longer than ours here
        assert time.monotonic() - start >= PATIENT


@pytest.mark.parametrize("body", [b"Content-Length: 100000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n{"])
def test_a_body_that_does_not_come(engine, body):
    server = Served(engine, client_body_timeout=0.5)
    with arrived(server, HEAD + body, HEAD + body) as (half, slow):
        drip(slow)
        status, code, message = error_of(rest(half))
        assert (status, code) == (408, "body_timeout")
        assert "1 bytes of the body" not in message and "500 bytes per second" in message
        assert server.metric("connections_cut_total", "body_timeout") == 2
        wait_until(lambda: server.metric("connections") == 0)
    assert not engine.prompts


def test_the_body_of_a_head_request_does_not_come(engine):
    async def echo(request):
        return Response(await request.body())

    server = Served(engine, client_body_timeout=0.5)
    server.app.add_route("/echo", echo)
    with http_server(server.app) as url, connect(url) as connection:
        connection.sendall(b"HEAD /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n1")
        head, end, body = rest(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408") and end and not body
        wait_until(lambda: server.metric("connections") == 0)


def a_body_that_comes_after_its_answer(engine, header_timeout):
    settings = {"client_header_timeout": header_timeout, "timeout_keep_alive": round(PATIENT)}
    with served(engine, **settings) as (url, server), connect(url) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            connection.sendall(b"12345")
        assert rest(connection) == b"", "it is idle then, and is closed as such"
        assert server.metric("connections_cut_total", "header_timeout") == 0


def a_slow_body_that_comes(engine):
    settings = {"client_header_timeout": PATIENT, "client_body_timeout": PATIENT}
    with served(engine, **settings) as (url, _), connect(url) as connection:
        start, body = time.monotonic(), b'{"prompt": "Hi"' + b" " * 120_000 + b"}"
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode())
        for begin in range(0, len(body), 1000):
            connection.sendall(body[begin : begin + 1000])
            time.sleep(0.09)
        assert time.monotonic() - start > PATIENT, "it must take longer than the time-out to show anything"
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream, choices", [(True, 128), (False, 128), (False, 16)])
def test_an_answer_that_nobody_reads(engine, stream, choices):
    with served(engine, send_timeout=0.5, timeout_keep_alive=1) as (url, server), connect(url, 2048) as connection:
        start = time.monotonic()
        # A stream is cut off in its middle, and its requests are aborted; the other's have ended by then.
        post(connection, prompt=["HANG"] if stream else ["Hi"], stream=stream, n=choices, logprobs=20)
        wait_until(lambda: server.metric("connections_cut_total", "send_timeout") == 1)
        assert time.monotonic() - start >= 0.5
        wait_until(lambda: not engine.running and server.metric("connections") == 0)
        assert not stream or engine.most_running == choices
        with pytest.raises(ConnectionResetError):
            rest(connection)


def an_answer_that_is_read_slowly(engine, stream, choices):
    with served(engine, send_timeout=PATIENT, timeout_keep_alive=1) as (url, _), connect(url, 8192) as connection:
        start, answer = time.monotonic(), b""
        post(connection, prompt="Hi", stream=stream, n=choices, logprobs=20)
        while b"data: [DONE]" not in answer[-100:] and b'"usage":{' not in answer[-1000:]:
            answer += connection.recv(4096)
            time.sleep(0.13)
        assert time.monotonic() - start > PATIENT, "it must take longer than the time-out to show anything"


SLOW = [
    (a_second_request_that_does_not_come,),
    (a_body_that_comes_after_its_answer, 0),
    (a_body_that_comes_after_its_answer, PATIENT / 2),
    (a_slow_body_that_comes,),
    (an_answer_that_is_read_slowly, True, 64),
    (an_answer_that_is_read_slowly, False, 128),
]
"""What waits for ``PATIENT`` seconds, and its arguments."""


@pytest.fixture(scope="module")
def slow() -> Iterator[list[Future[None]]]:
    """All of it at once, each with a server of its own: they do nothing but wait."""
    with ThreadPoolExecutor(len(SLOW)) as threads:
        yield [threads.submit(check, FakeEngine(), *args) for check, *args in SLOW]


@pytest.mark.parametrize("which", range(len(SLOW)), ids=lambda n: f"{SLOW[n][0].__name__}-{SLOW[n][1:]}")
def test_slowness(slow, which):
    slow[which].result()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_waits_long_is_not_cut_off(engine, stream):
    soon = {"client_header_timeout": 0.1, "client_body_timeout": 0.1, "send_timeout": 0.1, "keep_alive_interval": 0}
    body = json.dumps({"prompt": "SLEEP", "stream": stream}).encode()
    request = HEAD.replace(b"1.1", b"1.0") + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with arrived(Served(engine, **soon), request) as (client,):
        answer = httpx.Response(200, content=rest(client).partition(b"\r\n\r\n")[2])
    texts = [event["choices"][0]["text"] for event in events(answer)] if stream else []
    assert ("".join(texts) if stream else answer.json()["choices"][0]["text"]) == REPLY


def test_silent_connections_give_way_to_requests(engine):
    with served(engine, limit_concurrency=8) as (url, server), ExitStack() as stack:
        silent = []
        for number in range(40):
            connection = stack.enter_context(connect(url))
            connection.sendall([b"", HEAD, HEAD + b"Content-Length: 10\r\n\r\n{"][number % 3])
            silent.append(connection)
            if number < 3:  # what it sent has been read when a later client is answered
                assert httpx.get(f"{url}/health", timeout=300).status_code == 200
            if number % 10 == 9:
                assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}, timeout=300).status_code == 200
                assert server.metric("connections") <= 8
        # The first ones were closed, with an answer to those who had begun to ask.
        assert rest(silent[0]) == b""
        for connection in silent[1:3]:
            assert error_of(rest(connection))[:2] == (503, "limit_concurrency")
        assert engine.prompts == ["\x01Hi"] * 4


def test_more_requests_than_connections_may_be_open(engine):
    with served(engine, limit_concurrency=4) as (url, _), ExitStack() as stack:
        hanging = [stack.enter_context(connect(url)) for _ in range(4)]
        for connection in hanging:
            post(connection, prompt="HANG", stream=True)
        wait_until(lambda: len(engine.running) == 4)
        for _ in range(3):
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}, timeout=300)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "limit_concurrency"
            assert "4 connections open (--limit-concurrency)" in refused.json()["error"]["message"]
        with connect(url):  # nor does one that says nothing keep others from asking how the server is
            for path in ("/health", "/version", "/metrics"):
                assert httpx.get(url + path, timeout=300).status_code == 200
        hanging[0].close()
        wait_until(lambda: len(engine.running) == 3)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}, timeout=300).status_code == 200


def test_a_header_that_is_too_long(engine):
    with served(engine, h11_max_incomplete_event_size=5000) as (url, _):
        for length, status in ((4000, 200), (10_000, 400)):
            assert httpx.get(f"{url}/health", headers={"X-Long": "x" * length}, timeout=300).status_code == status


def test_the_limit_of_open_files():
    code = (
        "import resource, sys\nfrom shadowkv.serve.process import allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))\nallow_open_files(100)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    needed = 100 + FILES_BESIDE
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= needed
    runs = [
        subprocess.run([sys.executable, "-c", code.format(hard=hard)], capture_output=True, text=True)
        for hard in (needed, needed - 1)
    ]
    assert runs[0].stdout == f"{needed}\n"
    assert f"limit_concurrency=100 needs {needed} open files" in runs[1].stderr and "at most 99" in runs[1].stderr
