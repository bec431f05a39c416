"""Signals to a server process with the fake engine: SIGHUP drains as SIGTERM does, and nohup is heeded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fake_engine import REPLY

SERVER = """
import asyncio, signal, sys
from fake_engine import FakeEngine
from shadowkv.serve import __main__ as command

class Engine(FakeEngine):
    def describe(self):
        return []

    async def stats(self, usage=False):
        raise ValueError("a line\\\\n2026-01-01 forged")

    async def generate(self, requests, timeout=None):
        print("running", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        async for output in super().generate(requests, timeout):
            yield output

class Process:
    clients = [Engine()]

    def stop(self, seconds):
        self.clients[0].is_alive = False

    def when_it_ends(self, callback):
        pass

# Whatever the tests were started under.
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
command.start_engine = lambda config, compare: Process()
sys.exit(command.main(["--port", "0", "--shutdown-timeout", "1" if "brief" in sys.argv else "60"]))
"""


@contextmanager
def server(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process whose answers wait for a line on its stdin, and its URL."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            ready = process.stdout.readline()
            assert ready.startswith("ready: "), process.communicate()
            yield process, ready.split()[1].removesuffix("/v1")
        finally:
            process.kill()


def wait_until_closed(url: str) -> None:
    """Until no connection is accepted."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health", timeout=300)
        except httpx.TransportError:
            return
        time.sleep(0.01)
    raise AssertionError("connections are still accepted")


@pytest.mark.parametrize("terminal", ["open", "closed"])
def test_sighup_drains(terminal):
    with server() as (process, url), ThreadPoolExecutor(1) as client:
        assert httpx.get(f"{url}/metrics", timeout=300).status_code == 500  # which is logged
        if terminal == "closed":
            errors = process.stderr.readline()
            process.stderr.close()
        answer = client.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "Hi"}, timeout=300)
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGHUP)
        wait_until_closed(url)
        process.send_signal(signal.SIGHUP)  # a shell and its terminal may both send one
        print(file=process.stdin, flush=True)
        assert answer.result().json()["choices"][0]["text"] == REPLY
        if terminal == "open":
            errors = process.stderr.read()
            assert "stopping: 60 s for " in errors  # one, or two with a look whether it is closed
            assert "a line" in errors and "\n2026-01-01 forged" not in errors
        assert process.wait(300) == 128 + signal.SIGHUP


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files", "/page/document"])
def test_a_client_that_is_still_sending_is_told_of_the_end(path):
    with (
        server("brief") as (process, url),
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client,
    ):
        kind = {"/v1/completions": "application/json", "/v1/files": "multipart/form-data; boundary=x"}
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
        client.sendall(f"{head}Content-Type: {kind.get(path, 'application/octet-stream')}\r\n\r\n--x".encode())
        httpx.get(f"{url}/health", timeout=300)  # it has come by then
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        client.settimeout(120)
        received = b"".join(iter(lambda: client.recv(2**16), b""))
        assert received.startswith(b"HTTP/1.1 503") and b"the server is stopping" in received, received
        assert process.wait(300) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 20
        assert "Traceback" not in process.stderr.read()


def test_a_server_that_is_to_outlive_its_terminal_does():
    with server("nohup") as (process, url):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert httpx.get(f"{url}/health", timeout=300).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 128 + signal.SIGTERM
