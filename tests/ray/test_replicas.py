"""Two replicas with a small real model behind ``shadowkv ray serve``, on the CPU; at the end one of them is killed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shadowkv.engine.config import EngineConfig
from shadowkv.ray.serve import check_room
from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from tests.local_engine import LocalEngine
from tests.waiting import wait_until

SMALL = {"max_model_len": 1024, "max_num_seqs": 4, "max_cached_seqs": 2, "device": "cpu"}
KEY = {"Authorization": "Bearer secret"}
SECONDS = 300
"""Most that anything takes, on any machine."""


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def post(self, path: str = "/v1/completions", **body) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=KEY, timeout=SECONDS)

    def samples(self, name: str, **labels: str) -> dict[str, float]:
        """Values of a metric by replica, once all of them tell theirs soon enough."""
        end = time.monotonic() + SECONDS
        while (answer := httpx.get(f"{self.url}/metrics", timeout=SECONDS)).status_code == 503:
            assert time.monotonic() < end, answer.text
        page = answer.raise_for_status().text
        found = [one for family in text_string_to_metric_families(page) for one in family.samples if one.name == name]
        return {one.labels.get("replica", ""): one.value for one in found if labels.items() <= one.labels.items()}

    def replicas(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended
                if "ServeReplica:shadowkv:" in "".join(child.cmdline()[:1]):
                    found.append(child)
        return found

    def engines(self) -> dict[psutil.Process, psutil.Process]:
        """By replica, of those that have one."""
        found = {}
        for replica in self.replicas():
            with suppress(psutil.NoSuchProcess):
                for child in replica.children():
                    if "shadowkv.engine.process.main" in child.cmdline():
                        found[replica] = child
        return found

    def stream(self, prompt: str, tokens: int) -> Iterator[str]:
        """Its events' data."""
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, headers=KEY, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if line:
                    yield line.removeprefix("data: ")


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    """The plain one."""
    engine = LocalEngine(EngineConfig(**SMALL))
    engine.start()
    yield engine
    engine.shutdown(10)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    pytest.importorskip("ray.serve")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += ["--port=0", "--replicas=2", "--served-model-name=small", "--api-key=secret", "--max-body-mib=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "shadowkv.ray", "serve", *flags, f"--shutdown-timeout={SECONDS}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RAY_ADDRESS": "local",
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "100000000",
        },
    )
    family = [process]
    try:
        request.getfixturevalue("engine")  # meanwhile
        line = ""
        while not line.startswith("ready: "):
            line = process.stdout.readline()
            assert line, process.wait()
        family += psutil.Process(process.pid).children(recursive=True)
        yield Server(process, line.split()[1].removesuffix("/v1"))
    finally:
        with suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()


@pytest.fixture(scope="module")
def plain(engine: LocalEngine) -> Iterator[httpx.Client]:
    """A plain server's answers."""
    from starlette.testclient import TestClient

    settings = ServerSettings(api_key=("secret",), max_body_mib=1)
    with TestClient(build_app(engine, "small", settings)) as client:
        yield client


CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8, "temperature": 0}
RESPONSE = {"input": "Hi", "max_output_tokens": 4, "temperature": 0, "store": False}  # replicas keep none
REQUESTS = [
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    ("POST", "/v1/messages", CHAT),
    (
        "POST",
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 4, "temperature": 0, "store": False, "stream": True},
    ),
    ("POST", "/tokenize", {"prompt": "Hi"}),
    ("POST", "/v1/completions", {"prompt": "word " * 2000}),
    ("POST", "/v1/messages", {"messages": 7}),
    ("POST", "/v1/completions", {"prompt": "x" * 2**20}),
    ("GET", "/v1/models/other", None),
    ("GET", "/nowhere", None),
    ("DELETE", "/health", None),
    ("GET", "/health", None),
    ("GET", "/version", None),
    ("HEAD", "/v1/models", None),
]


def told(answer: httpx.Response) -> tuple[int, list[str], list[object], str]:
    """What an answer says, without its id and its times: its events and the text that they add. How the text of a
    stream is cut is left out: a busy server adds several tokens at once, also with the event that ends the answer."""
    names = sorted(name for name in answer.headers if name not in ("date", "server", "transfer-encoding", "connection"))
    assert len(answer.headers.get_list("x-request-id")) == 1

    def strip(value: object) -> object:
        if isinstance(value, list):
            return [strip(one) for one in value]
        if isinstance(value, dict):
            own = ("id", "item_id", "created", "created_at", "completed_at", "sequence_number", "timings")
            return {name: strip(one) for name, one in value.items() if name not in own}
        return value

    events: list[object] = []
    text = ""
    for line in answer.text.splitlines():
        if not line or line.startswith("event: "):  # the data has its type, too
            continue
        event: Any = line
        with suppress(ValueError):
            event = strip(json.loads(line.removeprefix("data: ")))
        added, alone = take_text(event)
        text += added
        if not alone:
            events.append(event)
    return answer.status_code, names, events, text


def take_text(event: Any) -> tuple[str, bool]:
    """Takes out the text that an event of a stream adds; and whether that is all that the event is there for."""
    if not isinstance(event, dict):
        return "", False
    if event.get("object") == "chat.completion.chunk":
        (choice,) = event["choices"]
        text = choice["delta"].pop("content", "")
        return text, bool(text) and choice["finish_reason"] is None
    return event.pop("delta", ""), event.get("type") == "response.output_text.delta"


@pytest.mark.slow
def test_answers_are_those_of_a_plain_server(server, plain):
    for method, path, body in REQUESTS:
        options = {"json": body, "headers": KEY} if body else {"headers": KEY}
        answer = httpx.request(method, server.url + path, timeout=SECONDS, **options)
        assert told(answer) == told(plain.request(method, path, **options)), (method, path)
    assert told(httpx.get(f"{server.url}/v1/models")) == told(plain.get("/v1/models"))  # without a key
    named = httpx.get(f"{server.url}/v1/models", headers={**KEY, "X-Request-Id": "mine"})
    assert named.headers["X-Request-Id"] == "mine"


@pytest.mark.slow
def test_a_prompt_goes_where_its_beginning_is_cached(server):
    prompts = [f"{word}. " + "List the days of the week, please. " * 20 for word in ("One", "Two")]

    def cached(prompt: str) -> int:
        usage = server.post(prompt=prompt, max_tokens=1).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    before = server.samples("shadowkv:prompt_tokens_total")
    assert [cached(prompt) for prompt in prompts] == [0, 0]
    assert all(cached(f"{prompt} {turn}") > 100 for turn in range(3) for prompt in prompts)
    after = server.samples("shadowkv:prompt_tokens_total")
    assert len(after) == 2 and all(after[name] > before[name] for name in after)
    assert server.samples("shadowkv:replicas") == {"": 2}


@pytest.mark.slow
def test_a_client_that_hangs_up_frees_its_sequence(server):
    stream = server.stream("Once", 900)
    next(stream)
    stream.close()
    aborted = {"name": "shadowkv:request_success_total", "finished_reason": "abort"}
    wait_until(lambda: sum(server.samples(**aborted).values()))
    wait_until(lambda: not sum(server.samples("shadowkv:num_requests_running").values()))


@pytest.mark.slow
def test_of_a_killed_replica_streams_end_with_an_error_and_the_rest_is_answered(server, plain):
    # Long enough that all of them run at once for many reads of the metrics. The next token is 0.1 more likely than
    # any other, whatever the batch.
    asked = {"prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    right = plain.post("/v1/completions", json=asked, headers=KEY).json()["choices"]
    streams = [server.stream(f"Story {number}:", 600) for number in range(2)]  # one in each
    for stream in streams:
        next(stream)
    with ThreadPoolExecutor(6) as pool:
        wholes = [pool.submit(server.post, **asked) for _ in range(4)]
        wait_until(lambda: sum(server.samples("shadowkv:num_requests_running").values()) == 6)
        os.kill(server.replicas()[0].pid, signal.SIGKILL)
        ends = [[json.loads(one) for one in lines[-3:-1]] for lines in pool.map(list, streams)]
        answers = [whole.result() for whole in wholes]
    assert [answer.json()["choices"] for answer in answers] == [right] * 4
    failed = [end[-1]["error"]["code"] for end in ends if "error" in end[-1]]
    assert failed == ["engine_dead"]
    assert [end[-1]["choices"][0]["finish_reason"] for end in ends if "error" not in end[-1]] == ["length"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def wait_for_both(server: Server) -> None:
    """Until both replicas answer: one may have been killed before."""
    wait_until(lambda: server.samples("shadowkv:replicas") == {"": 2})


@pytest.mark.slow
def test_a_replica_whose_engine_is_killed_is_replaced(server):
    wait_for_both(server)
    replica, engine = server.engines().popitem()
    engine.kill()
    end = time.monotonic() + SECONDS
    while replica in server.replicas() or len(server.engines()) < 2:
        answer = server.post(prompt="Once", max_tokens=1)
        assert answer.status_code == 200, answer.text
        assert time.monotonic() < end


@pytest.mark.slow
def test_what_runs_at_a_signal_to_stop_is_answered(server):
    wait_for_both(server)
    stream = server.stream("Once", 30)
    next(stream)
    replicas = server.replicas()
    server.process.send_signal(signal.SIGTERM)
    assert json.loads([*stream][-2])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(SECONDS) == 143
    assert not any(replica.is_running() for replica in replicas)


@pytest.mark.parametrize(
    ("replicas", "gpus", "said"),
    [
        (4, 0.0, "--replicas 4 with --cpus-per-replica 1 need 4 CPUs, and this machine has 2"),
        (1, 0.5, "--replicas 1 with --gpus-per-replica 0.5 need 0.5 GPUs, and this machine has 0"),
        (2, 0.0, None),
    ],
)
def test_more_replicas_than_this_machine_has_room_for_are_refused(
    replicas: int, gpus: float, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0})
    monkeypatch.setitem(sys.modules, "ray", cast(ModuleType, ray))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    args = argparse.Namespace(replicas=replicas, cpus_per_replica=1)
    if said is None:
        check_room(args, gpus)
        return
    with pytest.raises(ValueError, match=said):
        check_room(args, gpus)
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")  # which may get nodes for them
    check_room(args, gpus)
