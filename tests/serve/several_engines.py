"""Servers of several engines (``--data-parallel-size``), what they are asked, and what their metrics say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from replies import events
from server_processes import BODY, SECONDS, Server

TWO = "--data-parallel-size=2"
LONGER = '--hf-overrides={"max_position_embeddings": 8192}'
LONG_ANSWER = {"max_tokens": 6000}
"""An answer that outlasts what a test does meanwhile, also on a busy machine. It needs ``LONGER``."""
KILLED = "engine {} has died: its process has ended (SIGKILL: the system may have run out of memory)"


def engines(one: Server) -> list[psutil.Process]:
    return [one.engine, *one.workers]


def samples(one: Server, name: str, **labels: str) -> dict[str, float]:
    """Values of a metric by engine."""
    page = httpx.get(f"{one.url}/metrics", timeout=SECONDS).text
    found = [each for family in text_string_to_metric_families(page) for each in family.samples]
    return {
        each.labels.get("engine", ""): each.value
        for each in found
        if each.name == f"shadowkv:{name}" and labels.items() <= each.labels.items()
    }


class Stream:
    """A stream, which has its first token unless told otherwise, and is read on a thread."""

    def __init__(self, one: Server, **body: Any) -> None:
        self.text, self._first = "", threading.Event()
        self._client = httpx.Client(timeout=SECONDS)
        request = self._client.build_request("POST", f"{one.url}/v1/completions", json={**BODY, "stream": True, **body})
        self._thread = threading.Thread(target=self._read, args=(request,))
        self._thread.start()

    def _read(self, request: httpx.Request) -> None:
        response = self._client.send(request, stream=True)
        for text in response.iter_text():
            self.text += text
            self._first.set()
        self._first.set()

    def begun(self) -> Stream:
        assert self._first.wait(SECONDS)
        return self

    def last(self) -> Any:
        """Its last event."""
        self._thread.join(SECONDS)
        self._client.close()
        return events(self)[-1]


def batch_of(one: Server, *bodies: dict[str, Any]) -> str:
    """The id of a batch of completions."""
    line = {"method": "POST", "url": "/v1/completions"}
    data = "\n".join(json.dumps({"custom_id": str(number), **line, "body": body}) for number, body in enumerate(bodies))
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": data.encode()}}
    file = httpx.post(f"{one.url}/v1/files", timeout=SECONDS, **form).json()["id"]
    about = {"input_file_id": file, "endpoint": "/v1/completions"}
    id: str = httpx.post(f"{one.url}/v1/batches", json=about, timeout=SECONDS).json()["id"]
    return id


def batch_now(one: Server, id: str) -> Any:
    return httpx.get(f"{one.url}/v1/batches/{id}", timeout=SECONDS).json()


@contextmanager
def two_streams(one: Server, **body: Any) -> Iterator[list[Stream]]:
    """One in each engine, since the second goes to the one without work."""
    streams = [Stream(one, prompt=[40 + number] * 40, **body).begun() for number in range(2)]
    assert samples(one, "num_requests_running") == {"0": 1.0, "1": 1.0}
    yield streams
