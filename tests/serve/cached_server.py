"""A server of a real engine with a tiny model, whose prefix cache has all tiers, and a client that asks it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from http_server import http_server

from shadowkv.engine.config import EngineConfig
from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings
from tests.local_engine import LocalEngine

OFFLOAD = 0.03125


def tokens(seed: int, length: int = 300) -> list[int]:
    return random.Random(seed).choices(range(2, 256), k=length)


class Client:
    """Asks one server."""

    def __init__(self, url: str, engine: LocalEngine) -> None:
        self.engine, self.http = engine, httpx.Client(base_url=url, timeout=300)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def done(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def cached(self, prompt: list[int] | str, **body: Any) -> int:
        """Cached tokens of a prompt."""
        answer = self.done("/v1/completions", prompt=prompt, max_tokens=1, **body)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        (line,) = [one for one in lines if one.startswith(f"shadowkv:prefix_cache_{name}{{") and 'tier="disk"' in one]
        return float(line.split()[-1])

    def forget_above_the_disk(self) -> None:
        """Evicts all that is kept on the device and in host memory."""

        def forget(answer: Future[Any]) -> None:
            cache = self.engine.engine.scheduler.prefix_cache
            while cache.busy:
                cache.advance(idle=True)
            while cache.evict():
                pass
            for copy in [node.copy for node in cache._tree if node.copy and node.copy.slabs is not None]:
                cache.lower.copies.evict(copy)
            answer.set_result(None)

        asyncio.run(self.engine.ask(forget, 300))


@contextmanager
def serving(model: Path, directory: Path, settings: ServerSettings | None = None, **options: Any) -> Iterator[Client]:
    """Serves a model, with files in ``directory`` unless told otherwise."""
    given = {"kv": "full", "kv_offload_gib": OFFLOAD, "kv_disk_dir": str(directory), "max_num_seqs": 4}
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu", **{**given, **options})
    engine = LocalEngine(config)
    engine.start()
    try:
        with http_server(build_app(engine, "tiny", settings)) as url:
            client = Client(url, engine)
            with client.http:
                yield client
    finally:
        engine.shutdown(120)
