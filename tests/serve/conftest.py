"""A fake engine and ways to talk to its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from app_client import AppClient
from cached_server import serving
from fake_engine import FakeEngine
from http_server import http_server

from shadowkv.models.gguf.file import GGUFFile
from shadowkv.models.gguf.tokenizer import tokenizer_from_gguf
from shadowkv.models.sources import resolve
from shadowkv.models.tokenization.tokenizer import Tokenizer
from shadowkv.serve.app import build_app
from shadowkv.serve.batch.answers import run_batch
from shadowkv.serve.batch.files import BatchFiles
from shadowkv.serve.http.settings import ServerSettings
from tests.tiny_llama import write_config


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A real model's."""
    return tokenizer_from_gguf(GGUFFile(resolve("smollm2-135m-instruct", weights=True)))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def call(engine: FakeEngine) -> Iterator[Callable[..., httpx.Response]]:
    """Sends one request to the fake engine's application, without a socket."""
    with AppClient(engine) as client:
        yield client


@pytest.fixture
def post(call: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """POST of a body given as keywords; ``chat`` and ``completions`` are the urls."""

    def send(endpoint: str, **body: Any) -> httpx.Response:
        url = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[endpoint]
        defaults = {"messages": [{"role": "user", "content": "Hi"}]} if endpoint == "chat" else {"prompt": "Hi"}
        return call("POST", url, json={**defaults, **body})

    return send


@pytest.fixture
def client_of() -> Iterator[Callable[..., AppClient]]:
    """Makes clients of applications without a socket, of engines, with settings as keywords."""
    with ExitStack() as stack:
        yield lambda *engines, **settings: stack.enter_context(
            AppClient(engines[0], ServerSettings(**settings), *engines[1:])
        )


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    """The fake engine behind a socket."""
    with http_server(build_app(engine, "fake")) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ask() -> Iterator[Callable[..., httpx.Response]]:
    """Asks a server that reads thoughts and calls, of an engine whose answer is given; its ``engine`` is at hand."""
    engine = FakeEngine()
    engine.max_model_len = 4000
    with AppClient(engine, ServerSettings(reasoning_parser="qwen3", tool_call_parser="hermes")) as client:

        def send(url: str, reply: str, **body: Any) -> httpx.Response:
            engine.reply = reply
            return client.post(url, **body)

        send.engine = engine
        yield send


@pytest.fixture
def run(engine: FakeEngine, tmp_path: Path) -> Callable[..., int]:
    """A batch run of some lines by the fake engine; ``files`` of it are its files."""
    files = BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    def go(lines: list[str] | None, concurrency: int = 4, resume: bool = False) -> int:
        files = BatchFiles(go.files.input, go.files.output, resume)
        if lines is not None:
            files.input.write_text("\n".join(lines) + "\n", encoding="utf-8")
        with files.held():
            return run_batch(engine, "fake", files, concurrency)

    go.files = files
    return go


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights are drawn."""
    return write_config(tmp_path_factory.mktemp("tiny"), 48, 2048, tie_word_embeddings=False)


@pytest.fixture
def serve(tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Serves the tiny model, with files in ``cache`` unless told otherwise."""
    return partial(serving, tiny_model, tmp_path / "cache")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, where there is one."""
    from page_browser import chromium

    try:
        with chromium() as found:
            yield found
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of it, with nothing kept."""
    from page_browser import page_of

    with page_of(browser) as found:
        yield found
