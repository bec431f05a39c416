"""A server's two processes: when either dies the other notices at once, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest
from replies import events
from server_processes import RUNNING, SECONDS, Server, is_gone, server

from shadowkv.serve.process import ENGINE_DIED
from tests.waiting import wait_until

NOTICED, BUSY = 5.0, 60.0
"""Seconds within which one process knows that the other is gone: as a rule, and at the most on a machine that does
something else as well."""
KILLED = "the engine has died: its process has ended (SIGKILL: the system may have run out of memory)"
GRAMMAR = "shadowkv.engine.structured.grammar_process"
TIMES = [pytest.param(2, id="twice"), pytest.param(20, id="20 times", marks=pytest.mark.slow)]


def assert_prompt(waits: list[float]) -> None:
    print(f"noticed after {statistics.median(waits):.3f} s (median), {max(waits):.3f} s at the most")
    assert statistics.median(waits) < NOTICED and max(waits) < BUSY, waits


def grammars(server: Server) -> list[psutil.Process]:
    """The processes of grammars, but for the one that they are forked from."""
    forkers = [child for child in server.engine.children() if GRAMMAR in child.cmdline()]
    return [process for forker in forkers for process in forker.children()]


def compiles(server: Server) -> bool:
    """Whether a grammar has been compiled for a second. A first attempt ends earlier, maybe while it is looked at."""
    with suppress(psutil.NoSuchProcess):
        return any(process.cpu_times().user > 1 for process in grammars(server))
    return False


@contextmanager
def load(server: Server, **more: object) -> Iterator[list[Future[tuple[httpx.Response, float]]]]:
    """Twice as many requests as run, half of them streams, at work."""
    with ThreadPoolExecutor(2 * RUNNING) as clients:
        answers = [clients.submit(server.ask, number % 2 == 0, **more) for number in range(2 * RUNNING)]
        for gauge in ("running", "waiting"):
            wait_until(lambda gauge=gauge: server.gauge(f"num_requests_{gauge}") == RUNNING)
        yield answers


@pytest.mark.parametrize("times", TIMES)
def test_the_engines_process_is_killed(tiny_model: Path, times: int) -> None:
    waits = []
    for _ in range(times):
        with server(tiny_model) as one:
            family = one.family()
            with load(one) as answers:
                one.engine.kill()
                killed = time.monotonic()
                for stream, answer in enumerate(answers):
                    response, came = answer.result()
                    waits.append(came - killed)
                    if stream % 2 == 0 and response.status_code == 200:
                        error = events(response)[-1]["error"]
                    else:
                        assert response.status_code == 503
                        error = response.json()["error"]
                    assert (error["code"], error["message"]) == ("engine_dead", KILLED)
            assert one.http.wait(SECONDS) == ENGINE_DIED
            one.assert_nothing_is_left(family)
            log = one.log.read_text()
            assert log.count(f" ERROR shadowkv.engine.process.launch: {KILLED}\n") == 1 and "Traceback" not in log
    assert_prompt(waits)


def test_the_end_of_the_engine_waits_for_no_client(tiny_model: Path) -> None:
    """Whoever is still sending a request is told, however long requests may take to end otherwise."""
    with (
        server(tiny_model, "--shutdown-timeout=600") as one,
        socket.create_connection(("127.0.0.1", int(one.url.rsplit(":", 1)[1]))) as client,
    ):
        family = one.family()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: 1000\r\n\r\n{")
        assert one.health() == 200  # the above has come by then
        one.engine.send_signal(signal.SIGSEGV)
        assert one.http.wait(SECONDS) == ENGINE_DIED
        received = b"".join(iter(lambda: client.recv(2**16), b""))
        assert received.startswith(b"HTTP/1.1 503") and b"the server is stopping" in received
        assert "the engine has died: its process has ended (SIGSEGV)\n" in one.log.read_text()
        one.assert_nothing_is_left(family)


def test_what_servers_that_were_killed_have_left_is_gone_at_the_next_start(tiny_model: Path) -> None:
    with server(tiny_model) as one, server(tiny_model, temporary=one.folder) as other:
        upload = {"data": {"purpose": "batch"}, "files": {"file": b"{}"}}
        for each in (one, other):
            assert httpx.post(f"{each.url}/v1/files", timeout=SECONDS, **upload).status_code == 200
        (left, kept), before = (set(of.open_folders()) for of in (one, other)), set(one.folder.iterdir())
        assert left | kept == before and len(left) == len(kept) == 2
        family = one.family()
        one.engine.suspend()  # it would tidy up
        one.http.kill()
        one.http.wait(SECONDS)
        one.engine.kill()
        wait_until(lambda: all(map(is_gone, family)))
        assert set(one.folder.iterdir()) == before
        with server(tiny_model, temporary=one.folder) as third:
            assert not left & set(one.folder.iterdir())
            assert kept <= set(one.folder.iterdir())
            assert other.ask(max_tokens=2)[0].status_code == third.ask(max_tokens=2)[0].status_code == 200


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "under load"])
def test_the_http_process_is_killed(tiny_model: Path, times: int, in_flight: bool) -> None:
    waits = []
    for _ in range(times):
        with server(tiny_model) as one, ThreadPoolExecutor(2 * RUNNING) as clients:
            too_long, _ = one.ask(prompt="word " * 100_000)  # read in another process
            assert too_long.status_code == 400
            family = one.family()
            assert len(family) == 3
            lost = [clients.submit(one.ask, True) for _ in range(2 * RUNNING if in_flight else 0)]
            if in_flight:
                wait_until(lambda: one.gauge("num_requests_running") == RUNNING)
            one.http.kill()
            waits.append(wait_until(lambda: is_gone(one.engine)))
            one.http.wait()
            waits.append(wait_until(lambda family=family: all(map(is_gone, family))))
            one.assert_nothing_is_left(family)
            assert all(isinstance(answer.exception(SECONDS), httpx.HTTPError) for answer in lost)
    assert_prompt(waits)


def test_a_server_that_is_stopped_drains_and_leaves_nothing(tiny_model: Path) -> None:
    with server(tiny_model, "--shutdown-timeout=600") as one:
        family = one.family()
        with load(one) as answers:
            for process in family:  # as a service manager, or a terminal, does
                process.send_signal(signal.SIGTERM)
            assert [answer.result()[0].status_code for answer in answers] == [200] * len(answers)
        assert one.http.wait(SECONDS) == 128 + signal.SIGTERM
        one.assert_nothing_is_left(family)
        assert "engine has died" not in one.log.read_text()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_while_it_tries_a_schema(tiny_model: Path, end: signal.Signals) -> None:
    names = {f"p{number}": {} for number in range(200)}
    schema = {"type": "object", "properties": names, "minProperties": 80, "maxProperties": 150}  # takes minutes
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with server(tiny_model, "--shutdown-timeout=1") as one, ThreadPoolExecutor(1) as client:
        answer = client.submit(one.ask, response_format=format, ignore_eos=False)
        wait_until(lambda: compiles(one))
        family = one.family()
        one.http.send_signal(end)
        ended = time.monotonic()
        one.http.wait(SECONDS)
        if end == signal.SIGTERM:
            response, _ = answer.result()
            assert (response.status_code, response.json()["error"]["code"]) == (503, "server_stopping")
        else:
            assert isinstance(answer.exception(SECONDS), httpx.HTTPError)
        wait_until(lambda: all(map(is_gone, family)))
        assert time.monotonic() - ended < 1 + BUSY
        one.assert_nothing_is_left(family)


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_a_server_that_is_killed_while_it_loads_leaves_nothing(tiny_model: Path, seconds: float) -> None:
    command = [sys.executable, "-m", "shadowkv.serve", "--port=0", f"--model={tiny_model}", "--load-format=dummy"]
    with TemporaryDirectory(prefix="two-") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(
            [*command, "--device=cpu"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        ) as process:
            try:
                wait_until(lambda: psutil.Process(process.pid).children())
                (engine,) = psutil.Process(process.pid).children()
                time.sleep(seconds)  # the first message may be on its way
            finally:
                process.kill()
        wait_until(lambda: is_gone(engine))
        assert not os.listdir(folder)
