"""Several processes for HTTP before one engine (``--api-server-count``): they serve, count and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest
from replies import events
from server_processes import BODY, SECONDS, STOPPING, Server, is_gone, server

from shadowkv.serve.__main__ import parse
from shadowkv.serve.http.counts import Counts
from shadowkv.serve.process import ENGINE_DIED
from tests.waiting import wait_until

NOTICED = 60.0
"""Seconds within which a process knows that another is gone; as a rule it takes milliseconds."""
TWO = "--api-server-count=2"
STREAMS = 8


def open_in(one: Server) -> list[int]:
    """Connections of each process, the first one's first."""
    (file,) = one.folder.glob("shadowkv-*/counts")
    table = memoryview(file.read_bytes()).cast("q")
    return [*table[:: len(table) // (1 + len(one.workers))]]


class Stream:
    """A stream on a connection of its own, read on a thread.

    Attributes:
        process: which one serves it; -1 if another connection was opened or closed meanwhile.
        text: what has come of it.
        error: of the connection.
    """

    def __init__(self, one: Server, key: str = "none", **body: object) -> None:
        before = open_in(one)
        self._client = httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS)
        request = self._client.build_request("POST", f"{one.url}/v1/completions", json={**BODY, "stream": True, **body})
        self._response = self._client.send(request, stream=True)
        assert self._response.status_code == 200
        grown = [number for number, count in enumerate(open_in(one)) if count > before[number]]
        self.process = grown[0] if len(grown) == 1 else -1
        self.text, self.error, self._left = "", None, False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for text in self._response.iter_text():
                self.text += text
                if self._left:
                    break
        except httpx.HTTPError as error:
            self.error = error
        self._client.close()

    def leave(self) -> None:
        """Hangs up."""
        self._left = True
        self.join()

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join(SECONDS)
        assert self.is_over

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def events(self) -> list[Any]:
        """All, once it is over."""
        self.join()
        assert self.error is None, self.error
        return events(self)


@contextmanager
def streams_in_both(one: Server, count: int = STREAMS, **body: object) -> Iterator[list[Stream]]:
    """So many streams at work, more if all the first are in one process."""
    streams: list[Stream] = []
    try:
        while len(streams) < count or not {0, 1} <= {stream.process for stream in streams}:
            assert len(streams) < 12 * count, "one process serves all"
            streams.append(Stream(one, prompt=[2 + len(streams)] * 40, **body))
        yield streams
    finally:
        for stream in streams:
            stream.join()


def test_counts_are_of_all_processes(tmp_path: Path) -> None:
    Counts.create(file := tmp_path / "counts", 2, 3)
    first, second, _ = processes = [Counts(2, file, row) for row in range(3)]
    assert [one.processes for one in processes] == [3, 3, 3]
    first.connections, second.connections = 5, 7
    assert [one.connections for one in processes] == [12, 12, 12]
    assert first.begin(1, 2) and second.begin(1, 2)
    assert [one.begin(1, 2) for one in processes] == [False] * 3
    assert all(one.begin(0, 0) and one.begin(1, 0) for one in processes)  # another key, and no limit
    second.end(1)
    second.end(1)
    first.clear(0)
    assert first.connections == 7 and second.begin(1, 2) and not second.begin(1, 2)
    alone = Counts(1)
    assert alone.processes == 1 and alone.begin(0, 1) and not alone.begin(0, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-server-count=0"], "--api-server-count 0 must be at least 1"),
        ([TWO, "--input=a", "--output=b"], "--api-server-count is for a server, not for a batch run"),
        (["--api-server-count=two"], "argument --api-server-count: 'two' is no whole number"),
    ],
)
def test_flags_that_are_refused(flags, message, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(flags)
    assert message in capsys.readouterr().err


def test_both_answer_count_and_drain(tiny_model: Path) -> None:
    with server(tiny_model, TWO, f"--max-num-seqs={STREAMS}", "--shutdown-timeout=100") as one:
        body = {"max_tokens": 200}
        with streams_in_both(one, **body) as streams:
            texts = ["".join(event["choices"][0]["text"] for event in stream.events()) for stream in streams]
        alone = [one.ask(prompt=[2 + number] * 40, **body)[0].json() for number in range(len(streams))]
        assert texts == [answer["choices"][0]["text"] for answer in alone]
        # The same from either process: each of the answers is to a connection of its own.
        success = f'shadowkv:request_success_total{{finished_reason="length",model_name="{tiny_model.name}"}}'
        for _ in range(STREAMS):
            page = httpx.get(f"{one.url}/metrics", timeout=SECONDS).text.splitlines()
            assert f"{success} {2 * len(texts):.1f}" in page
            assert [line.split()[-1] for line in page if line.startswith("shadowkv:connections{")] == ["1.0"]
            assert sum(line.startswith("shadowkv:num_requests_running{") for line in page) == 1
            stats = httpx.get(f"{one.url}/page/stats", timeout=SECONDS).json()
            assert stats["generated_tokens"] == 200 * 2 * len(texts) and stats["first_tokens"] == 2 * len(texts)
        family = one.family()
        with streams_in_both(one, max_tokens=500) as streams:
            for process in family:  # as a service manager, or a terminal, does
                process.send_signal(signal.SIGTERM)
            reasons = [stream.events()[-1]["choices"][0]["finish_reason"] for stream in streams]
            assert reasons == ["length"] * len(streams)
        assert one.http.wait(SECONDS) == 128 + signal.SIGTERM
        one.assert_nothing_is_left(family)
        log = one.log.read_text()
        assert "ERROR" not in log and "Traceback" not in log


@pytest.mark.slow
def test_requests_in_flight_end_with_an_error_after_the_drain_time(tiny_model: Path) -> None:
    with server(tiny_model, TWO, f"--max-num-seqs={STREAMS}", "--shutdown-timeout=0.2") as one:
        family = one.family()
        with streams_in_both(one) as streams:
            one.http.send_signal(signal.SIGTERM)
            errors = [stream.events()[-1]["error"] for stream in streams]
        assert [(error["code"], error["message"]) for error in errors] == [STOPPING] * len(streams)
        assert one.http.wait(SECONDS) == 128 + signal.SIGTERM
        one.assert_nothing_is_left(family)


@pytest.mark.slow
def test_limits_hold_over_both(tiny_model: Path) -> None:
    limits = ["--max-concurrent-requests-per-key=2", "--limit-concurrency=4", "--api-key", "a", "b"]
    with server(tiny_model, TWO, *limits) as one, ExitStack() as stack:

        def ask(key: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            body = {**BODY, "max_tokens": 1}
            return httpx.post(f"{one.url}/v1/completions", json=body, headers=headers, timeout=SECONDS)

        streams: list[Stream] = []
        while {stream.process for stream in streams} != {0, 1}:  # one in each
            for stream in streams:
                stream.leave()
            wait_until(lambda: open_in(one) == [0, 0])
            streams = [Stream(one, "a") for _ in range(2)]
        for _ in range(STREAMS):
            refused = ask("a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "2 requests with this API key" in refused.text
        assert ask("b").status_code == 200
        streams += [Stream(one, "b") for _ in range(2)]
        for _ in range(STREAMS):
            refused = ask("b")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "limit_concurrency")
        assert not any(stream.is_over for stream in streams), "they were at work all the time"
        for stream in streams:
            stack.callback(stream.join)


@pytest.mark.slow
def test_what_is_kept_is_known_to_all(tiny_model: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**BODY, "max_tokens": 4}}
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": json.dumps(line).encode()}}
    with server(tiny_model, TWO) as one:
        family = one.family()

        def ask(method: str, path: str, **options: Any) -> Any:
            answer = httpx.request(
                method, f"{one.url}/v1/{path}", timeout=SECONDS, **options
            )  # a connection of its own
            assert answer.status_code == 200, answer.text
            return answer.json()

        file = ask("POST", "files", **form)
        assert all(ask("GET", f"files/{file['id']}") == file for _ in range(STREAMS))
        about = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        batches = [ask("POST", "batches", json=about)["id"] for _ in range(STREAMS)]
        for id in batches:
            wait_until(lambda id=id: ask("GET", f"batches/{id}")["status"] == "completed")
            assert ask("GET", f"batches/{id}")["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        one.http.send_signal(signal.SIGTERM)
        one.http.wait(SECONDS)
        one.assert_nothing_is_left(family)


def test_a_worker_is_killed(tiny_model: Path) -> None:
    with server(tiny_model, TWO, f"--max-num-seqs={3 * STREAMS}") as one:
        (worker,) = one.workers
        with streams_in_both(one) as streams:
            kept = [stream for stream in streams if stream.process == 0]
            assert one.gauge("num_requests_running") == len(streams)
            wait_until(lambda: sum(open_in(one)) == len(streams))  # the question's own is closed
            worker.kill()
            waited = wait_until(lambda: open_in(one) == [len(kept), 0])
            waited += wait_until(lambda: one.gauge("num_requests_running") == len(kept))
            assert not any(stream.is_over for stream in kept), "the engine would have had nothing to abort"
            assert waited < NOTICED
            assert one.gauge("connections") == len(kept) + 1
            for stream in streams:
                stream.join()
                assert (stream.error is None) == (stream in kept)
            assert {stream.events()[-1]["choices"][0]["finish_reason"] for stream in kept} == {"length"}
        for _ in range(STREAMS):
            assert one.ask(max_tokens=2)[0].status_code == one.health() == 200
        assert (
            "an HTTP process has ended (SIGKILL: the system may have run out of memory); it is not restarted"
            in one.log.read_text()
        )
        family = one.family()
        one.http.send_signal(signal.SIGTERM)
        assert one.http.wait(SECONDS) == 128 + signal.SIGTERM
        one.assert_nothing_is_left(family)


@pytest.mark.slow
def test_the_first_process_is_killed(tiny_model: Path) -> None:
    with server(tiny_model, TWO, f"--max-num-seqs={STREAMS}") as one:
        family = one.family()
        with streams_in_both(one) as streams:
            one.http.kill()
            assert wait_until(lambda: all(map(is_gone, family))) < NOTICED
            for stream in streams:
                stream.join()
                # The first may have come to their ends before there were streams in both.
                assert stream.error is not None or stream.text.rstrip().endswith("[DONE]")
            assert any(stream.error for stream in streams)
        one.http.wait()
        one.assert_nothing_is_left(family)


@pytest.mark.slow
def test_the_engines_process_is_killed(tiny_model: Path) -> None:
    with server(tiny_model, TWO, f"--max-num-seqs={STREAMS}") as one:
        family = one.family()
        with streams_in_both(one) as streams:
            one.engine.kill()
            errors = [stream.events()[-1]["error"] for stream in streams]
        assert {error["code"] for error in errors} == {"engine_dead"}
        assert one.http.wait(SECONDS) == ENGINE_DIED
        one.assert_nothing_is_left(family)
        (line,) = (line for line in one.log.read_text().splitlines() if " ERROR " in line)
        assert "the engine has died: its process has ended (SIGKILL: " in line


@pytest.mark.slow
def test_a_worker_that_does_not_start_ends_the_server(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "shadowkv.serve", "--port=0", f"--model={tiny_model}", "--load-format=dummy"]
    with TemporaryDirectory(prefix="api-") as folder:
        with subprocess.Popen(
            [*command, "--device=cpu", "--kv=full", TWO],
            text=True,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder},
        ) as process:
            first = psutil.Process(process.pid)
            try:
                wait_until(lambda: process.poll() is not None or len(first.children()) == 2)
                engine, worker = first.children()
                worker.kill()
                _, errors = process.communicate(timeout=SECONDS)
            finally:
                process.kill()
        assert process.returncode == 2
        assert (
            errors.splitlines()[-1]
            == "error: an HTTP process has not started: SIGKILL: the system may have run out of memory"
        )
        assert is_gone(engine) and not os.listdir(folder)
