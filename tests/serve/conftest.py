"""A fake engine and ways to talk to its server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from http_server import http_server

from shadowkv.serve.api import build_app


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def call(engine: FakeEngine) -> Iterator[Callable[..., httpx.Response]]:
    """Sends one request to the fake engine's application, without a socket."""
    app = build_app(engine, "fake")

    def send(method: str, url: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                return await client.request(method, url, **options)

        return asyncio.run(run())

    yield send
    app.state.bodies.close()  # as at a server's end


@pytest.fixture
def post(call: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """POST of a body given as keywords; ``chat`` and ``completions`` are the urls."""

    def send(endpoint: str, **body: Any) -> httpx.Response:
        url = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[endpoint]
        defaults = {"messages": [{"role": "user", "content": "Hi"}]} if endpoint == "chat" else {"prompt": "Hi"}
        return call("POST", url, json={**defaults, **body})

    return send


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    """The fake engine behind a socket."""
    with http_server(build_app(engine, "fake")) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
